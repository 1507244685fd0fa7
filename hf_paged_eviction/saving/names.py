"""Snapshots as named tensors and plain JSON, and back.

One walk serves all parts: a tensor is called by the way to it (`layers.0.store.keys`), and everything else stands in a
tree of JSON values. On the way back the types of the fields say what has to stand where, so no file can bring anything
but tensors, numbers and words.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from ..parts import Snapshot

_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, NoneType)
_KIND = "kind"


def take_apart(part: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The JSON tree of a snapshot, and its tensors by name.

    Raises:
        TypeError: it holds something that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    return _apart(part, name, tensors), tensors


def _apart(part: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(part, Tensor):
        tensors[name] = part
        return name
    if isinstance(part, _PLAIN):
        return part
    if is_dataclass(part) and not isinstance(part, type):
        tree = {
            field.name: _apart(getattr(part, field.name), _join(name, field.name), tensors) for field in fields(part)
        }
        return {_KIND: type(part).__name__, **tree} if isinstance(part, Snapshot) else tree
    if isinstance(part, Mapping):
        return {str(key): _apart(value, _join(name, key), tensors) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_apart(value, _join(name, place), tensors) for place, value in enumerate(part)]
    if isinstance(part, frozenset):
        return sorted(part)
    raise TypeError(f"{name} is a {type(part).__name__}, which cannot be written down by name")


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def put_together(kind: type[_T], tree: Any, tensors: dict[str, Tensor]) -> _T:
    """The reverse of `take_apart`.

    Args:
        kind: of the snapshot.
        tensors: all of them have to be used.

    Raises:
        ValueError: the tree does not fit the kind, or a tensor is missing or belongs nowhere.
    """
    left = dict(tensors)
    found = _together(kind, tree, "", left)
    if left:
        raise ValueError(f"the tensor {next(iter(left))!r} belongs nowhere")
    return found  # type: ignore[no-any-return]


def _together(kind: Any, tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if type(tree) in inside and type(tree) in _PLAIN and Tensor not in inside:
            return tree
        rest = [each for each in inside if each is not NoneType]
        if tree is None and NoneType in inside:
            return None
        if len(rest) == 1:
            return _together(rest[0], tree, name, tensors)
    elif kind is Tensor:
        if tree == name and name in tensors:
            return tensors.pop(name)
    elif kind in _PLAIN:
        if type(tree) is kind or (kind is float and type(tree) is int):
            return tree
    elif origin in (list, frozenset) and isinstance(tree, list):
        return origin(_together(inside[0], value, _join(name, place), tensors) for place, value in enumerate(tree))
    elif origin is dict and isinstance(tree, dict):
        return {
            _key(inside[0], key, name): _together(inside[1], value, _join(name, key), tensors)
            for key, value in tree.items()
        }
    elif is_dataclass(kind) and isinstance(tree, dict):
        return _dataclass(kind, tree, name, tensors)
    raise ValueError(f"{name or 'the state'} is not what it has to be ({getattr(kind, '__name__', kind)})")


def _key(kind: Any, key: str, name: str) -> Any:
    if kind is str:
        return key
    if not (key.isascii() and key.isdecimal() and str(int(key)) == key):
        raise ValueError(f"{name} has the key {key!r}, which is no number")
    return int(key)


def _dataclass(kind: Any, tree: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    tree = dict(tree)
    if issubclass(kind, Snapshot):
        kinds, wanted = {cls.__name__: cls for cls in _kinds(kind)}, tree.pop(_KIND, None)
        if wanted not in kinds:
            raise ValueError(f"{name or 'the state'} is a {wanted!r}, not one of {', '.join(kinds)}")
        kind = kinds[wanted]
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    tree = {field.name: None for field in fields(kind) if field.default is None} | tree  # files of before lack some
    if sorted(tree) != sorted(names):
        differing = sorted(set(tree) ^ set(names))
        raise ValueError(f"{name or 'the state'} lacks, or should not have, {', '.join(differing)}")
    return kind(**{each: _together(hints[each], tree[each], _join(name, each), tensors) for each in names})


def _kinds(kind: Any) -> list[Any]:
    """The class and all that are made from it: a codec may keep a store's tensors in fields of its own."""
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in _kinds(below))]
