"""Policies by name."""

from collections.abc import Callable
from typing import TypeVar

from .base import EvictionPolicy

PolicyClass = TypeVar("PolicyClass", bound=type[EvictionPolicy])

_POLICIES: dict[str, type[EvictionPolicy]] = {}


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: make a policy available as `policy="name"`.

    Registering the same class again (a notebook cell run twice) replaces it.

    Raises:
        TypeError: the class is not an `EvictionPolicy`.
        ValueError: the name belongs to another class.
    """

    def register(cls: PolicyClass) -> PolicyClass:
        if not (isinstance(cls, type) and issubclass(cls, EvictionPolicy)):
            raise TypeError(f"@register_policy({name!r}) needs a subclass of EvictionPolicy, got {cls!r}.")
        taken = _POLICIES.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"The policy name {name!r} is taken by {taken.__module__}.{taken.__qualname__}.")
        cls.name = name
        _POLICIES[name] = cls
        return cls

    return register


def available_policies() -> tuple[str, ...]:
    """Names of all registered policies, sorted."""
    return tuple(sorted(_POLICIES))


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy of that name with its default parameters; a policy object is returned as it is.

    Raises:
        ValueError: no policy has that name.
        TypeError: neither a name nor a policy object.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or an EvictionPolicy object (not a class), got {policy!r}.")
    if policy not in _POLICIES:
        raise ValueError(f"Unknown policy {policy!r}. Available: {', '.join(available_policies())}.")
    return _POLICIES[policy]()
