"""Save layers of transformers: all their attributes that are tensors, numbers or words."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..layer.paged import PagedLayer
from ..tensors.parts import tensors_of
from ..tensors.saved import StateDict, restored

#: Attributes from the configuration, which no forward changes.
_FIXED = ("sliding_window", "number_of_states", "max_cache_len")


def other_state(layer: Any) -> StateDict:
    """The state of the layer by attribute; of a layer that is also paged, that of its linear state. A dtype becomes its
    name.

    Raises:
        ValueError: a value cannot be saved.
    """
    names = vars(LinearAttentionLayer() if isinstance(layer, PagedLayer) else layer)
    state = {"layer": type(layer).__name__, **{name: getattr(layer, name) for name in names if name != "device"}}
    for name, value in state.items():
        if isinstance(value, torch.dtype):
            state[name] = value = str(value)
        for part in value.values() if isinstance(value, dict) else [value]:
            if not isinstance(part, Tensor | bool | int | float | str | None):
                raise ValueError(
                    f"a {type(layer).__name__} holds {name}, a {type(part).__name__}, which cannot be saved by name. "
                    "Use copy.deepcopy of the cache within this process."
                )
    return state


def load_other(saved: StateDict, layer: Any, device: torch.device, static: bool) -> None:
    """Restore a new layer from the state of another one.

    Args:
        static: mark tensors as static for compiled graphs.

    Raises:
        ValueError: it is a layer of another kind or size.
    """
    here = {"layer": type(layer).__name__, **{name: vars(layer)[name] for name in _FIXED if name in vars(layer)}}
    there = {name: saved.pop(name, None) for name in here}
    if there != here:
        raise ValueError(f"it has a layer {there} where {here} belongs")
    for name, value in saved.items():
        is_dtype = isinstance(value, str) and value.startswith("torch.")
        new = getattr(torch, value[6:]) if is_dtype else restored(getattr(layer, name, None), value, name)
        setattr(layer, name, new)
        for tensor in tensors_of(new) if static else []:
            torch._dynamo.mark_static_address(tensor)
    if saved.get("dtype") is not None:
        layer.device = device
