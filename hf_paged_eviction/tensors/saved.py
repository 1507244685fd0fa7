"""The state of parts of a cache, and its checked reading from a file that anybody may have written.

`state_dict()` of a part returns tensors, numbers, words, and dictionaries and lists of these. `load_state(saved)` reads
them back, and checks each value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .parts import persistent

#: The state of a part, by name.
StateDict = dict[str, Any]
#: No text is longer, and sums of such numbers are still far from overflowing.
LONGEST = 2**40


def take_apart(part: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into plain JSON, with names instead of tensors, and the tensors by name. None is left out of
    dictionaries.

    Raises:
        TypeError: a value is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    return _apart(part, "", tensors), tensors


def _apart(part: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(part, Tensor):
        tensors[name] = part
        return name
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if is_dataclass(part) and not isinstance(part, type):
        part = {field.name: getattr(part, field.name) for field in fields(part)}
    if isinstance(part, Mapping):
        there = {str(key): value for key, value in part.items() if value is not None}
        return {key: _apart(value, _join(name, key), tensors) for key, value in there.items()}
    if isinstance(part, list | tuple):
        return [_apart(value, _join(name, place), tensors) for place, value in enumerate(part)]
    if isinstance(part, frozenset):
        return sorted(part)
    raise TypeError(f"{name} is a {type(part).__name__}, which cannot be written down by name")


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


class SavedState:
    """One part of a file. Each value is checked when it is read, and `finish` refuses values that were not read.

    All methods raise `ValueError` with the name of a missing or wrong value.

    Attributes:
        name: path of this part in the file.
        device: device for the tensors.

    Args:
        tree, tensors: see `take_apart`.
    """

    def __init__(self, tree: Any, tensors: dict[str, Tensor], device: torch.device, name: str = "") -> None:
        if not isinstance(tree, dict):
            raise ValueError(f"{name or 'the state'} is not what it has to be (a table of names)")
        self.name, self.device = name, device
        self._left, self._tensors = dict(tree), tensors
        self._parts: list[SavedState] = []

    def need(self, condition: bool | Tensor, what: str) -> None:
        """Refuse the file with this reason unless the condition is true."""
        if not bool(condition):
            raise ValueError(f"{self.name}: {what}")

    def finish(self) -> None:
        """Refuse the file if it has values that were not read."""
        for part in self._parts:
            part.finish()
        if self._left:
            raise ValueError(f"{self.name or 'the state'} should not have {', '.join(sorted(self._left))}")
        if not self.name and self._tensors:
            raise ValueError(f"the tensor {next(iter(self._tensors))!r} belongs nowhere")

    # ---- plain values ---------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether there is a value with this name."""
        return key in self._left

    def keys(self) -> list[str]:
        """Names of the values that were not read yet."""
        return list(self._left)

    def value(self, key: str, *kinds: type) -> Any:
        """Read a value of one of these types."""
        if key not in self._left:
            raise ValueError(f"{self.name or 'the state'} lacks {key}")
        value = self._left[key]
        if type(value) not in kinds:
            raise self._wrong(key, " or ".join(kind.__name__ for kind in kinds))
        del self._left[key]
        return value

    def _wrong(self, key: str, kind: str) -> ValueError:
        return ValueError(f"{_join(self.name, key)} is not what it has to be ({kind})")

    def number(self, key: str, least: int, most: int) -> int:
        """Read a whole number; both bounds are included."""
        number: int = self.value(key, int)
        if not least <= number <= most:
            raise ValueError(f"{_join(self.name, key)} is {number}, outside {least} .. {most}")
        return number

    def numbers(self, key: str, least: int, most: int) -> list[int]:
        """Read a list of whole numbers; both bounds are included."""
        numbers: list[int] = self.value(key, list)
        if not all(type(number) is int and least <= number <= most for number in numbers):
            raise ValueError(f"{_join(self.name, key)} has numbers outside {least} .. {most}")
        return numbers

    def flag(self, key: str) -> bool:
        """Read a bool."""
        flag: bool = self.value(key, bool)
        return flag

    # ---- parts ----------------------------------------------------------------------------------------------------

    def part(self, key: str, device: torch.device | None = None) -> "SavedState":
        """The part with this name."""
        tree, name = self.value(key, dict), _join(self.name, key)
        self._parts.append(SavedState(tree, self._tensors, device or self.device, name))
        return self._parts[-1]

    def parts(self, key: str, devices: Sequence[torch.device]) -> "Iterator[SavedState | None]":
        """A list of parts, one for each of these devices; None for a missing part."""
        trees, name = self.value(key, list), _join(self.name, key)
        if len(trees) != len(devices):
            raise ValueError(f"it has {len(trees)} {key}, and the model {len(devices)}")
        for at, (tree, device) in enumerate(zip(trees, devices, strict=True)):
            if tree is not None:
                self._parts.append(SavedState(tree, self._tensors, device, _join(name, at)))
            yield None if tree is None else self._parts[-1]

    # ---- tensors --------------------------------------------------------------------------------------------------

    def peek(self, key: str, dims: int) -> Tensor:
        """Look at a tensor of so many dimensions without marking it as read."""
        tensor = self._there(key)
        if tensor.ndim != dims:
            raise ValueError(f"{_join(self.name, key)} is {list(tensor.shape)}, and has to be of {dims} dimensions")
        return tensor

    def _there(self, key: str) -> Tensor:
        name = _join(self.name, key)
        if key not in self._left or self._left[key] != name or name not in self._tensors:
            raise self._wrong(key, "a tensor")
        return self._tensors[name]

    def checked(
        self,
        key: str,
        shape: Sequence[int | None],
        dtype: torch.dtype | None,
        least: float | None = None,
        most: float | None = None,
    ) -> Tensor:
        """Read a tensor without a copy.

        Args:
            shape: None = any size.
            dtype: None = any floating-point type.
            least, most: bounds of its numbers, both included; None = not checked.
        """
        tensor, name = self.peek(key, len(shape)), _join(self.name, key)
        fits = all(size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True))
        if not fits or not (tensor.dtype.is_floating_point if dtype is None else tensor.dtype == dtype):
            wanted = [size if size is not None else "any" for size in shape]
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} where {dtype or 'floating point'} {wanted} belongs"
            )
        looked = least is not None and most is not None and tensor.numel()
        if looked and not least <= float(tensor.min()) <= float(tensor.max()) <= most:  # type: ignore[operator]
            raise ValueError(f"{name} has numbers outside {least} .. {most}")
        del self._left[key], self._tensors[name]
        return tensor

    def tensor(
        self,
        key: str,
        shape: Sequence[int | None],
        dtype: torch.dtype | None,
        least: float | None = None,
        most: float | None = None,
    ) -> Tensor:
        """Like `checked`, but a copy on the device, which may be written to inside and outside of
        `torch.inference_mode`."""
        return persistent(self.checked(key, shape, dtype, least, most).to(self.device))

    def of_rows(self, key: str, rows: int) -> Tensor:
        """Like `tensor`, for real numbers in any shape that begins with so many rows."""
        tensor = self.any(key)
        fits = tensor.ndim > 0 and tensor.shape[0] == rows and not tensor.is_complex() and tensor.dtype != torch.bool
        self.need(fits, f"{key} is {tensor.dtype} {list(tensor.shape)} for {rows} rows")
        return tensor

    def any(self, key: str) -> Tensor:
        """Like `tensor`, for any shape and dtype."""
        return self.like(key, self._there(key))

    def like(self, key: str, tensor: Tensor, least: float | None = None, most: float | None = None) -> Tensor:
        """Like `tensor`, with the shape and dtype of another tensor."""
        return self.tensor(key, tensor.shape, tensor.dtype, least, most)
