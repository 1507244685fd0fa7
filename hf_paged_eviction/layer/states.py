"""Linear states beside keys and values (mamba, short convolutions): transformers' own, which count no tokens."""

from collections.abc import Sequence
from typing import Any

import torch

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # earlier releases have no such layers, so none is ever made
    LinearAttentionLayer = type(None)


class LinearStates:
    """All linear states of a cache. Notes at which length of the text each was changed last, because a state that has
    changed while its tokens were never counted belongs to a forward that failed.

    Attributes:
        any: whether there are any.
        changed_at: that length, by layer.

    Args:
        layers: all of the cache.
        counting: the last of them that counts the tokens it has seen; None where none does.
        static: whether tensors stay where they are as long as they fit.
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
        """Between forwards: has a forward that failed left tokens in a state, behind the `seen` counted ones?"""
        return seen in self.changed_at.values()

    def begin(self, rows: int) -> None:
        """The first forward of a text comes, with so many rows: nothing is left of another."""
        self.changed_at.clear()
        for layer in self._layers:
            if self._static and rows_of(layer) == rows:
                LinearAttentionLayer.reset(layer)
            else:
                _forget(layer)

    def forget(self) -> None:
        """Give all up: the next prompt may have another number of rows, which these would not fit."""
        self.changed_at.clear()
        for layer in self._layers:
            _forget(layer)

    def taken_back(self) -> None:
        """The text is shorter now."""
        self.changed_at.clear()


def _forget(layer: Any) -> None:
    # transformers keeps the tensors and copies what comes next into them, which takes as many rows.
    recording = layer.record_past
    LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
    layer.record_past = recording


def rows_of(layer: Any) -> int:
    """Of a layer with linear states; 0 where it has met no token."""
    for states in (layer.conv_states, layer.recurrent_states):
        tensors = states.values() if isinstance(states, dict) else states if isinstance(states, list) else [states]
        for state in tensors:
            if state is not None:
                return int(state.shape[0])
    return 0
