"""Values attached to objects, such as configurations, from outside."""

import weakref
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ByObject(Generic[_T]):
    """A mapping by the identity of objects. Configurations cannot be keys of a dictionary, because they compare by
    their settings. A value disappears with its object; a copy of the object has no value."""

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
        """The value of an object; None = no value."""
        return self._values.get(id(owner))
