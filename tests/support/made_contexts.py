"""Saved contexts in which something was changed, with a digest that is right again."""

import copy
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor

from made_files import shapes

Place = tuple[Any, ...]
VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 1, 3, 7, 10**12, 2**70, -(2**63), 1.5, True, False, "x", "", "keydiff"),
    *([], [1], [[0, 1]], [[0, 10**9]], {}, {"a": 1}),
)
NUMBERS = (-1, -2, 0, 1, 2, 23, 24, 25, 40, 2**62, -(2**63))
MORE_TYPES = (torch.complex64, torch.float64, torch.bfloat16, torch.int32)


def places(content: Any, before: Place = ()) -> Iterator[Place]:
    """Of everything that stands in it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*before, name)
        yield from places(value, (*before, name))


def _tensor(draw: Random, tensor: Tensor) -> Tensor:
    if not tensor.numel() or not tensor.ndim:
        return torch.zeros(3)
    kind = draw.random()
    if kind < 0.4:
        return draw.choice([*islice(shapes(tensor), None if tensor.is_floating_point() else 7)])
    if kind < 0.6:
        return tensor.to(draw.choice(MORE_TYPES))
    changed = tensor.flatten().clone()
    at = draw.randrange(len(changed))
    if tensor.dtype == torch.bool:
        changed[at] = ~changed[at]
    elif tensor.is_floating_point():
        changed[at] = draw.choice((torch.nan, torch.inf, -torch.inf, 1e38, -1.0, 0.0))
    else:
        info = torch.iinfo(tensor.dtype)
        changed[at] = min(max(draw.choice(NUMBERS), info.min), info.max)
    return changed.reshape(tensor.shape)


def changed(draw: Random, content: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[str, Any, Any]:
    """What was changed, and both with one thing in them changed."""
    content, tensors = copy.deepcopy(content), dict(tensors)
    if draw.random() < 0.5:
        name = draw.choice(sorted(tensors))
        tensors[name] = _tensor(draw, tensors[name])
        return f"{name} is {tensors[name].dtype} {tensors[name]}", content, tensors
    *way, last = draw.choice([*places(content)])
    inner: Any = content
    for step in way:
        inner = inner[step]
    if draw.random() < 0.1:
        del inner[last]
        return f"{(*way, last)} is gone", content, tensors
    inner[last] = draw.choice(VALUES)
    return f"{(*way, last)} is {inner[last]!r}", content, tensors
