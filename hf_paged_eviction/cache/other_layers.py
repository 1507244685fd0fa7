"""Save layers of transformers: all their attributes that are tensors, numbers or words."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..tensors.saved import SavedState, StateDict
from .facts import dtype_name

#: Attributes that a layer gets only with its first tokens.
_LATE = frozenset({"keys", "values", "dtype", "device"})
#: Attributes from the configuration, which no forward changes.
_FIXED = frozenset({"sliding_window", "_sliding_window_tensor", "number_of_states", "max_cache_len"})
#: Attributes that are saved elsewhere: the paged part of a layer.
_ELSEWHERE = frozenset({"paged"})


def other_state(layer: Any) -> StateDict:
    """The state of the layer by attribute; values in a dictionary are named `attribute.key`. A dtype becomes a word, a
    device True, and None is left out.

    Raises:
        ValueError: a value has no name, or cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, bool | int | float | str | None] = {}
    for name, value in _items(layer):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, torch.dtype):
            plain[name] = dtype_name(value)
        elif isinstance(value, torch.device):
            plain[name] = True
        elif value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
        else:
            raise ValueError(
                f"a {type(layer).__name__} holds {name}, a {type(value).__name__}, which cannot be saved by name. "
                "Use copy.deepcopy of the cache within this process."
            )
    return {"layer": type(layer).__name__, "tensors": tensors, "plain": plain}


def _items(layer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(layer).items():
        if name in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def load_other(saved: SavedState, layer: Any, rows: int, static: bool) -> None:
    """Restore a new layer from the state of another one.

    Args:
        static: mark tensors as static for compiled graphs.

    Raises:
        ValueError: an attribute does not fit; the message names it.
    """
    kind, own = saved.value("layer", str), type(layer).__name__
    saved.need(kind == own, f"it is a {own} here and a {kind} in the file")
    plain, tensors, present = saved.part("plain"), saved.part("tensors"), dict(_items(layer))
    for name in [*present, *sorted(_LATE - set(present))]:
        fresh, both = present.get(name), plain.has(name) and tensors.has(name)
        saved.need(not both, f"{name} is there twice")
        if tensors.has(name):
            _set(layer, name, _tensor(tensors, name, fresh, rows, static))
        elif plain.has(name):
            _set(layer, name, _plain(plain, name, fresh))
        else:
            saved.need(name not in _FIXED or fresh is None, f"{name} is {fresh!r} here, and not in the file")
            saved.need(fresh is None or name in _LATE, f"it lacks {name}")


def _plain(plain: SavedState, name: str, fresh: Any) -> Any:
    value = plain.value(name, bool, int, float, str)
    if name == "dtype":
        plain.need(isinstance(getattr(torch, str(value), None), torch.dtype), f"dtype is {value!r}")
        return getattr(torch, str(value))
    if name == "device":
        plain.need(value is True, f"device is {value!r}")
        return plain.device
    plain.need(name not in _FIXED or value == fresh, f"{name} is {fresh!r} here and {value!r} in the file")
    # An attribute that is None at first may become a tensor or a count.
    fits = type(value) is int if fresh is None else type(value) is type(fresh)
    fits = fits and not (type(value) is int and value < 0)
    plain.need(fits, f"{name} is {value!r}, which a new layer has as {fresh!r}")
    return value


def _tensor(tensors: SavedState, name: str, fresh: Any, rows: int, static: bool) -> Tensor:
    kind = type(fresh).__name__
    tensors.need(fresh is None or isinstance(fresh, Tensor), f"{name} is a tensor in the file and a {kind} here")
    tensor = tensors.any(name)
    if name in _FIXED:
        same = fresh is not None and tensor.shape == fresh.shape and bool((tensor == fresh.to(tensor.device)).all())
        tensors.need(same, f"{name} differs")
    else:
        fits = not tensor.numel() or (tensor.ndim >= 2 and tensor.shape[0] == rows)
        tensors.need(fits, f"{name} has shape {list(tensor.shape)}, but there are {rows} rows")
    if static:
        torch._dynamo.mark_static_address(tensor)
    return tensor


def _set(layer: Any, name: str, value: Any) -> None:
    attribute, _, key = name.partition(".")
    if key:
        getattr(layer, attribute)[int(key)] = value
    else:
        setattr(layer, attribute, value)
