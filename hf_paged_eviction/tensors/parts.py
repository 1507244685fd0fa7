"""Operations on all tensors of a part of a layer.

A part keeps its tensors in dataclasses, with rows in dimension 0. `map_tensors` walks through them, so beams, selection
and repetition of rows need no code per tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def persistent(tensor: Tensor) -> Tensor:
    """A copy that may be written to inside and outside of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def map_tensors(change: Callable[..., Tensor], part: _T, *others: _T) -> _T:
    """Return a part with every tensor changed; the given part does not change.

    Args:
        change: gets a tensor, and the corresponding tensors of the other parts.
        part: a tensor, or dataclasses, mappings, lists and tuples of tensors; other values are not changed.
        others: parts of the same structure.
    """
    mapped: Any = part
    if isinstance(mapped, Tensor):
        mapped = change(part, *others)
    elif is_dataclass(part) and not isinstance(part, type):
        mapped = replace(part, **_map_items(change, vars(part), *map(vars, others)))
    elif isinstance(part, Mapping):
        mapped = _map_items(change, *(mapped, *others))
    elif isinstance(part, list | tuple):
        mapped = type(part)(map_tensors(change, *values) for values in zip(part, *others, strict=True))
    return mapped  # type: ignore[no-any-return]


def tensors_of(part: Any) -> list[Tensor]:
    """All tensors of a part, in the order in which `map_tensors` comes to them."""
    if isinstance(part, Tensor):
        return [part]
    if is_dataclass(part) and not isinstance(part, type):
        part = vars(part)
    tensors: list[Tensor] = []
    for value in part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is not None:
            tensors += tensors_of(value)
    return tensors


def split_rows(part: _T, rows: int) -> list[_T]:
    """Split a dataclass of tensors (or None) into views of so many rows each."""
    split = {name: tensor.split(rows) for name, tensor in vars(part).items() if tensor is not None}
    return [type(part)(**dict(zip(split, views, strict=True))) for views in zip(*split.values(), strict=True)]


def _map_items(change: Callable[..., Tensor], *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: map_tensors(change, *[part[name] for part in parts]) for name in parts[0]}
