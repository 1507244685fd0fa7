"""Keys and values that users may read but not write."""

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor


class _Exposed(NamedTuple):
    storage: ref[Tensor]
    states: Tensor  # the layer's memory, or a copy of it
    version: int  # version at the time they were handed out


class ExposedStates:
    """Detects writes to the tensors that `layer.keys` and `layer.values` returned.

    Attributes:
        states: the returned tensors, by name.

    Args:
        layer_idx: index of the layer, for messages.
    """

    def __init__(self, layer_idx: int) -> None:
        self._layer_idx = layer_idx
        self.states: dict[str, _Exposed] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without exposed tensors, because nobody has them."""
        self.check()
        return {"_layer_idx": self._layer_idx, "states": {}}

    def expose(self, name: str, storage: Tensor | None) -> Tensor | None:
        """Return the same memory as another tensor, whose version counter counts only the writes of others.

        Raises:
            RuntimeError: see `check`.
        """
        if storage is None or torch.compiler.is_compiling():
            return storage
        self.check()
        exposed = self.states.get(name)
        if exposed is not None and exposed.storage() is storage:
            return exposed.states
        with torch.inference_mode(False):
            states = storage.clone() if storage.is_inference() else storage.data
        self.states[name] = _Exposed(ref(storage), states, states._version)
        return states

    def check(self) -> None:
        """Check for writes, before held states are used or changed.

        Raises:
            RuntimeError: somebody has written to a returned tensor.
        """
        for name, exposed in [*self.states.items()]:
            if exposed.states._version != exposed.version:
                raise RuntimeError(
                    f"layer.{name} of layer {self._layer_idx} was written to. It is there to be read: which token lies "
                    "in which slot, and what was worked out from keys and values, is kept beside it. Call "
                    "cache.reset() and begin anew. For states that may be changed, take "
                    "DynamicCache(ddp_cache_data=list(cache)); to hide tokens from then on, pass an attention_mask "
                    "with zeros for them; to take back the newest, call cache.crop(-n)."
                )
            if exposed.storage() is None:  # the layer has replaced its storage
                del self.states[name]

    def forget(self) -> None:
        """Forget the returned tensors."""
        self.states.clear()
