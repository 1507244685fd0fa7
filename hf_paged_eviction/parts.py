"""Parts of a layer: each keeps its tensors in dataclasses, rows first, so that one loop serves them all.

What belongs to a row follows it through beams, selection and repetition, is counted in bytes, copied and moved. None of
this is written down tensor by tensor: these functions walk through whatever a part is made of.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def persistent(tensor: Tensor) -> Tensor:
    """A copy that may be written to in and out of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def map_tensors(change: Callable[..., Tensor], part: _T, *others: _T) -> _T:
    """The same part with every tensor in it changed; the part itself stays as it is.

    Args:
        change: given a tensor, and the tensors that stand in its place in the other parts.
        part: a tensor, or dataclasses, mappings, lists and tuples of tensors; anything else is left alone.
        others: made in the same way.
    """
    found: Any = part
    if isinstance(found, Tensor):
        found = change(part, *others)
    elif is_dataclass(part) and not isinstance(part, type):
        found = replace(part, **_map_items(change, vars(part), *map(vars, others)))
    elif isinstance(part, Mapping):
        found = _map_items(change, *(found, *others))
    elif isinstance(part, list | tuple):
        found = type(part)(map_tensors(change, *values) for values in zip(part, *others, strict=True))
    return found  # type: ignore[no-any-return]


def _map_items(change: Callable[..., Tensor], *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: map_tensors(change, *(part[name] for part in parts)) for name in parts[0]}


def tensors_of(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a part with its name, such as `choice.slots`."""
    if isinstance(part, Tensor):
        yield name, part
        return
    below: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(part, Mapping):
        below = iter(part.items())
    elif is_dataclass(part):
        below = iter(vars(part).items())
    elif isinstance(part, list | tuple):
        below = enumerate(part)
    for own, value in below:
        yield from tensors_of(value, f"{name}.{own}" if name else f"{own}")
