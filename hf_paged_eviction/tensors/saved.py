"""The state of parts of a cache as JSON and named tensors, and back.

`state_dict()` of a part returns tensors, numbers, words, and dataclasses, dictionaries and lists of these; its
`load_state(saved)` gets them back as dictionaries. A file has a digest of everything in it, so its content is what was
written, and is trusted as weights are: only shapes, dtypes and the ranges of indices are checked.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .parts import persistent

#: The state of a part, by name.
StateDict = dict[str, Any]
#: No text is longer, and sums of such numbers are still far from overflowing.
LONGEST = 2**40

_T = TypeVar("_T")
_N = TypeVar("_N", int, Tensor)


def take_apart(part: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split a state into plain JSON, with names instead of tensors, and the tensors by name. None is left out of
    dictionaries.

    Raises:
        TypeError: a value is neither a tensor nor plain.
    """
    if isinstance(part, Tensor):
        return name, {name: part}
    if part is None or isinstance(part, bool | int | float | str):
        return part, {}
    if isinstance(part, frozenset):
        return sorted(part), {}
    if is_dataclass(part) and not isinstance(part, type):
        part = {field.name: getattr(part, field.name) for field in fields(part)}
    if not isinstance(part, Mapping | list | tuple):
        raise TypeError(f"{name} is a {type(part).__name__}, which cannot be written down by name")
    named = part if isinstance(part, Mapping) else dict(enumerate(part))
    parts = {str(key): take_apart(value, _join(name, key)) for key, value in named.items()}
    tensors = {path: tensor for _, own in parts.values() for path, tensor in own.items()}
    if isinstance(part, Mapping):
        return {key: tree for key, (tree, _) in parts.items() if tree is not None}, tensors
    return [tree for tree, _ in parts.values()], tensors


def put_together(tree: Any, tensors: Mapping[str, Tensor], device: torch.device, name: str = "") -> Any:
    """Undo `take_apart` of the part with this name. Tensors are copies on the device, which may be written to inside
    and outside of `torch.inference_mode`.

    Raises:
        KeyError: a tensor is missing.
    """
    if isinstance(tree, dict):
        return {key: put_together(value, tensors, device, _join(name, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [put_together(value, tensors, device, _join(name, at)) for at, value in enumerate(tree)]
    return persistent(tensors[name].to(device)) if name and tree == name else tree


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def restored(part: _T, saved: Any, name: str = "") -> _T:
    """A part with the values of a saved state; what the state lacks stays as in `part`.

    Args:
        part: tensors, plain values, and dataclasses and dictionaries of these. None takes any value.
        name: of the part, for errors.

    Raises:
        ValueError: a tensor has another shape or dtype than that in `part`, or a value another type.
    """
    new: Any = saved
    if is_dataclass(part) and not isinstance(part, type):
        items = {key: restored(value, saved[key], key) for key, value in vars(part).items() if key in saved}
        new = replace(part, **items)
    elif isinstance(part, dict):
        new = {key: restored(value, saved.get(str(key), value), str(key)) for key, value in part.items()}
    elif isinstance(part, frozenset):
        new = frozenset(saved)
    elif isinstance(part, Tensor) and isinstance(saved, Tensor):
        if (saved.shape, saved.dtype) != (part.shape, part.dtype):
            raise ValueError(
                f"{name} is {saved.dtype} {list(saved.shape)}, where {part.dtype} {list(part.shape)} belongs"
            )
    elif part is not None and type(part) is not type(saved):
        raise ValueError(f"{name} is a {type(saved).__name__}, where a {type(part).__name__} belongs")
    return new  # type: ignore[no-any-return]


def in_range(name: str, index: _N, least: int, most: int) -> _N:
    """An index, or a tensor of indices, that lies between these bounds, both included.

    Raises:
        ValueError: it does not.
    """
    numbers = index if isinstance(index, Tensor) else torch.tensor(index, device="cpu")
    if bool(((numbers < least) | (numbers > most)).any()):
        raise ValueError(f"{name} has numbers outside {least} .. {most}")
    return index
