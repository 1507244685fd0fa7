"""Policies by name."""

import inspect
from collections.abc import Callable
from typing import TypeVar

from .base import EvictionPolicy
from .calibrated import PREFIX, Calibrated
from .modifier import Modifier
from .spelling import Spelling, SpellingError, read

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
    """Names of all registered policies, sorted. Modifiers, which are no policy alone, have a list of their own."""
    return tuple(sorted(name for name, cls in _POLICIES.items() if not issubclass(cls, Modifier)))


def available_modifiers() -> tuple[str, ...]:
    """Names of all registered modifiers, such as `caote` in `caote(h2o)`, sorted."""
    return tuple(sorted(name for name, cls in _POLICIES.items() if issubclass(cls, Modifier)))


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy of that name or text; a policy object is returned as it is.

    Args:
        policy: a name ("h2o"), a name with parameters ("snapkv(window=16, pooling=max)"), a modifier around policies
            ("graphkv(hybrid(h2o, recency), sources=0.2)") or a file ("calibrated:F.safetensors"). An object's `label`
            is such a text.

    Raises:
        ValueError: no policy has that name or parameter, a value is out of range, or the text is no policy.
        TypeError: neither a text nor a policy object.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or an EvictionPolicy object (not a class), got {policy!r}.")
    policy = policy.strip()
    if policy in _POLICIES:
        return _build(Spelling(policy, (), {}, 0), policy)
    if policy.startswith(PREFIX):
        return Calibrated(policy[len(PREFIX) :])
    if "(" not in policy:
        raise _unknown(policy)
    return _build(read(policy), policy)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"Unknown policy {name!r}. Available: {', '.join(available_policies())}. Modifiers of these: "
        f"{', '.join(available_modifiers())}."
    )


def _build(spelling: Spelling, text: str) -> EvictionPolicy:
    cls = _POLICIES.get(spelling.name)
    if cls is None:
        raise _unknown(spelling.name)
    _check_hosts(cls, spelling, text)
    signature = inspect.signature(cls)
    known = [name for name, parameter in signature.parameters.items() if parameter.default is not parameter.empty]
    for name in spelling.parameters:
        if name not in known:
            has = f"Its parameters: {', '.join(known)}" if known else "It has no parameters"
            raise SpellingError.at(text, spelling.column, f"{spelling.name} has no parameter {name}. {has}")
    hosts = [_build(host, text) for host in spelling.hosts]
    try:
        bound = signature.bind(*hosts, **spelling.parameters)
    except TypeError as error:
        example = f", as in {cls.example!r}" if issubclass(cls, Modifier) else ""
        raise SpellingError.at(text, spelling.column, f"{spelling.name}: {error}{example}") from None
    return cls(*bound.args, **bound.kwargs)


def _check_hosts(cls: type[EvictionPolicy], spelling: Spelling, text: str) -> None:
    if issubclass(cls, Modifier) and not spelling.hosts:
        raise ValueError(
            f"{spelling.name!r} changes the scores of other policies and is none alone. Write it around one, as in "
            f"{cls.example!r}."
        )
    if spelling.hosts and not issubclass(cls, Modifier):
        reason = f"{spelling.name} takes no other policy. Those that do are {', '.join(available_modifiers())}"
        raise SpellingError.at(text, spelling.hosts[0].column, reason)
