"""The linear states of a cache (mamba, short convolutions), in transformers' own layers, which count no tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer


class LinearStates:
    """All linear states of a cache. It notes the length of the text at the last change of each state: a state that
    changed without a count of its tokens belongs to a forward that failed.

    Attributes:
        any: whether the cache has linear states.
        changed_at: length of the text at the last change, by layer.

    Args:
        layers: all layers of the cache.
        counting: the last layer that counts its tokens; None if none does.
        static: whether tensors keep their addresses as long as they fit.
    """

    def __init__(self, layers: Sequence[Any], counting: Any, static: bool) -> None:
        own = {at: layer for at, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer)}
        self.any = bool(own)
        self._layers = [layer for layer in own.values() if hasattr(layer, "number_of_states")]
        self._counting, self._static = counting, static
        # What comes after the last count is changed when this forward has been counted.
        last = next((at for at, layer in enumerate(layers) if layer is counting), 0)
        self._early = {at for at in own if at < last}
        self.changed_at: dict[int, int] = {}

    def changing(self, layer_idx: int) -> None:
        """A forward is about to change the state of this layer."""
        if layer_idx in self._early and not torch.compiler.is_compiling():
            self.changed_at[layer_idx] = self._counting.get_seq_length()

    def ahead(self, seen: int) -> bool:
        """Whether, between forwards, some state has tokens of a failed forward, behind the `seen` counted ones."""
        return seen in self.changed_at.values()

    def begin(self, rows: int) -> None:
        """Clear all states before the first forward of a text, which has `rows` rows."""
        self.changed_at.clear()
        for layer in self._layers:
            if self._static and rows_of(layer) == rows:
                LinearAttentionLayer.reset(layer)
            else:
                _forget(layer)

    def forget(self) -> None:
        """Drop all states: the next prompt may have another number of rows."""
        self.changed_at.clear()
        for layer in self._layers:
            _forget(layer)

    def taken_back(self) -> None:
        """Called after tokens were taken back."""
        self.changed_at.clear()


def _forget(layer: Any) -> None:
    # transformers keeps the tensors and copies what comes next into them, which takes as many rows.
    recording = layer.record_past
    LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
    layer.record_past = recording


def rows_of(layer: Any) -> int:
    """Number of rows of a layer with linear states; 0 if it has seen no token."""
    for states in (layer.conv_states, layer.recurrent_states):
        tensors = states.values() if isinstance(states, dict) else states if isinstance(states, list) else [states]
        for state in tensors:
            if state is not None:
                return int(state.shape[0])
    return 0
