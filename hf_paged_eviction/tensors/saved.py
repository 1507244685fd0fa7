"""The state of parts of a cache as JSON and named tensors, and back.

A part says once what its state is: `STATE` names its attributes, or `state_dict()` returns it, as tensors, numbers,
words, and dataclasses, dictionaries and lists of these. `restored` walks a new part and what was saved together. A file
has a digest of everything in it, so its content is what was written, and is trusted as weights are: only shapes, dtypes
and the ranges of indices are checked.
"""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

#: The state of a part, by name.
StateDict = dict[str, Any]

_T = TypeVar("_T")
_N = TypeVar("_N", int, Tensor)


def take_apart(part: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The JSON of a state, in which `{"tensor": name}` stands for each tensor; `tensors` gets these."""
    if isinstance(part, Tensor):
        tensors[name] = part
        return {"tensor": name}
    if is_dataclass(part):
        part = vars(part)
    if isinstance(part, Mapping):
        return {key: take_apart(value, tensors, f"{name}.{key}".lstrip(".")) for key, value in part.items()}
    if isinstance(part, list | tuple | frozenset):
        return [take_apart(value, tensors, f"{name}.{at}") for at, value in enumerate(part)]
    return part


def put_together(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `take_apart`; dataclasses become dictionaries, tuples and sets lists, and keys words.

    Raises:
        KeyError: a tensor is missing.
    """
    return json.loads(text, object_hook=lambda part: tensors[part["tensor"]] if [*part] == ["tensor"] else part)


def state_of(part: Any) -> StateDict:
    """The attributes that `STATE` of this part names."""
    return {name: getattr(part, name) for name in part.STATE}


def restore(part: Any, saved: StateDict) -> None:
    """Set the attributes that `STATE` of this part names, see `restored`."""
    for name in part.STATE:
        setattr(part, name, restored(getattr(part, name), saved[name], name))


def restored(part: _T, saved: Any, name: str = "") -> _T:
    """A part with the values of a saved state; what the state lacks stays as in `part`.

    Args:
        part: tensors, plain values, and dataclasses and dictionaries of these. What is None or empty takes any value.
        name: of the part, for errors.

    Raises:
        ValueError: a tensor has another shape or dtype than that in `part`, or a word is another. KeyError: a part is
            missing.
    """
    new: Any = saved
    if is_dataclass(part) and not isinstance(part, type):
        items = {key: restored(value, saved[key], key) for key, value in vars(part).items() if key in saved}
        new = replace(part, **items)
    elif isinstance(part, dict) and part:
        new = {key: restored(value, saved[str(key)], str(key)) for key, value in part.items()}
    elif isinstance(part, frozenset):
        new = frozenset(saved)
    elif isinstance(part, str) and part != saved:
        raise ValueError(f"{name} is {saved!r} in the file, {part!r} here")
    elif isinstance(part, Tensor):
        there, here = ((getattr(one, "dtype", None), [*getattr(one, "shape", ())]) for one in (saved, part))
        if there != here:
            raise ValueError("{} is {} {}, where {} {} belongs".format(name, *there, *here))
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
