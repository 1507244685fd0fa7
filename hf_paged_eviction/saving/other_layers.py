"""Layers of transformers' own: whatever they hold, as long as it has a name and is a tensor, a number or a word."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..parts import Snapshot, persistent
from .facts import dtype_name

#: What a layer gets with its first tokens only.
_LATE = frozenset({"keys", "values", "dtype", "device"})
#: What the configuration says, and no forward changes.
_FIXED = frozenset({"sliding_window", "_sliding_window_tensor", "number_of_states", "max_cache_len"})
#: What is kept elsewhere: the paged half of a layer.
_ELSEWHERE = frozenset({"paged"})


@dataclass(frozen=True)
class OtherSnapshot(Snapshot):
    """The attributes of a layer; those in a dictionary are named `attribute.key`.

    Attributes:
        layer: name of its class.
        tensors: as they are.
        plain: all others. A dtype is a word, a device is True.
    """

    layer: str
    tensors: dict[str, Tensor]
    plain: dict[str, bool | int | float | str | None]


def snapshot_other(layer: Any) -> OtherSnapshot:
    """All that the layer holds.

    Raises:
        ValueError: some of it has no name, or is nothing that can be written down.
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
                f"a {type(layer).__name__} holds {name}, a {type(value).__name__}, which cannot be written down by "
                "name. A copy.deepcopy of the cache holds it, within this process."
            )
    return OtherSnapshot(type(layer).__name__, tensors, plain)


def _items(layer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(layer).items():
        if name in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def check_other(saved: OtherSnapshot, layer: Any, rows: int) -> None:
    """Refuse what does not belong into a layer like this.

    Args:
        layer: as it was made, without any token.

    Raises:
        ValueError: with the attribute.
    """
    if saved.layer != type(layer).__name__:
        raise ValueError(f"it is a {type(layer).__name__} here and a {saved.layer} in the file")
    present, known = dict(_items(layer)), {*saved.tensors, *saved.plain}
    unknown = sorted((known - set(present) - _LATE) | (set(present) - known)) or sorted(
        set(saved.tensors) & set(saved.plain)
    )
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is there only once, or twice, of a {saved.layer}")
    for name, value in saved.plain.items():
        _check_plain(name, value, present.get(name))
    for name, tensor in saved.tensors.items():
        _check_tensor(name, tensor, present.get(name), rows)


def _check_plain(name: str, value: Any, fresh: Any) -> None:
    if name == "dtype":
        if not (value is None or isinstance(getattr(torch, str(value), None), torch.dtype)):
            raise ValueError(f"dtype is {value!r}")
        return
    if name == "device":
        if value not in (None, True):
            raise ValueError(f"device is {value!r}")
        return
    if name in _FIXED and value != fresh:
        raise ValueError(f"{name} is {fresh!r} here and {value!r} in the file")
    # What is None at first becomes a tensor or a count.
    fits = value is None or type(value) is int if fresh is None else type(value) is type(fresh)
    if not fits or (type(value) is int and value < 0):
        raise ValueError(f"{name} is {value!r}, which a new layer has as {fresh!r}")


def _check_tensor(name: str, tensor: Tensor, fresh: Any, rows: int) -> None:
    if not (fresh is None or isinstance(fresh, Tensor)):
        raise ValueError(f"{name} is a tensor in the file and a {type(fresh).__name__} here")
    if name in _FIXED:
        if fresh is None or tensor.shape != fresh.shape or bool((tensor != fresh.cpu()).any()):
            raise ValueError(f"{name} differs")
    elif tensor.numel() and (tensor.ndim < 2 or tensor.shape[0] != rows):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but there are {rows} rows")


def restore_other(saved: OtherSnapshot, layer: Any, device: torch.device, static: bool) -> None:
    """Give the layer all that another one held.

    Args:
        static: compiled graphs are to know that tensors stay where they are.
    """
    for name, value in saved.plain.items():
        if value is not None and name in ("dtype", "device"):
            _set(layer, name, device if name == "device" else getattr(torch, str(value)))
        else:
            _set(layer, name, value)
    for name, tensor in saved.tensors.items():
        placed = persistent(tensor.to(device))
        if static:
            torch._dynamo.mark_static_address(placed)
        _set(layer, name, placed)


def _set(layer: Any, name: str, value: Any) -> None:
    attribute, _, key = name.partition(".")
    if key:
        getattr(layer, attribute)[int(key)] = value
    else:
        setattr(layer, attribute, value)
