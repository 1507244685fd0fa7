"""What is known of objects that cannot say it themselves, such as configurations."""

import weakref
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ByObject(Generic[_T]):
    """Values by the identity of an object, since configurations are equal where their settings are, and no keys of a
    dictionary. A value goes with its object; a copy of the object has none."""

    def __init__(self) -> None:
        self._values: dict[int, _T] = {}

    def __setitem__(self, owner: object, value: _T) -> None:
        self._values[id(owner)] = value
        weakref.finalize(owner, self._values.pop, id(owner), None)

    def __delitem__(self, owner: object) -> None:
        del self._values[id(owner)]

    def __contains__(self, owner: object) -> bool:
        return id(owner) in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, owner: object) -> _T | None:
        """What is known of this object; None = nothing."""
        return self._values.get(id(owner))
