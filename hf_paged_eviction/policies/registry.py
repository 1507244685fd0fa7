"""Policies by name."""

from collections.abc import Callable
from typing import TypeVar

from ..naming import Kind, Registry
from .base import EvictionPolicy
from .calibrated import Calibrated
from .gate import Gate
from .modifier import Modifier

PolicyClass = TypeVar("PolicyClass", bound=type[EvictionPolicy])

#: All of them.
POLICIES: Registry[EvictionPolicy] = Registry(
    Kind("policy", "policies", "snapkv(window=16)", "caote(h2o)"),
    EvictionPolicy,  # type: ignore[type-abstract]
    Modifier,
    {each.name: each for each in (Calibrated, Gate)},
)


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: make a policy available as `policy="name"`.

    Registering the same class again (a notebook cell run twice) replaces it. A package makes its policies known without
    being imported by entry points of the group `hf_paged_eviction.policies`.

    Raises:
        TypeError: the class is not an `EvictionPolicy`.
        ValueError: the name belongs to another class.
    """
    return POLICIES.register(name)


def available_policies() -> tuple[str, ...]:
    """Names of all registered policies, sorted. Modifiers (`available_modifiers`) and policies that are made of a file
    (`available_policy_files`), whose names alone are no policy, have lists of their own."""
    return POLICIES.names()


def available_policy_files() -> tuple[str, ...]:
    """How the names of policies begin that are made of a file, such as "calibrated:F.safetensors", sorted."""
    return tuple(f"{name}:" for name in sorted(POLICIES.of_files))


def available_modifiers() -> tuple[str, ...]:
    """Names of all registered modifiers, such as `caote` in `caote(h2o)`, sorted."""
    return POLICIES.names(modifiers=True)


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy of that name or text; a policy object is returned as it is.

    Args:
        policy: a name ("h2o"), a name with parameters ("snapkv(window=16, pooling=max)"), a modifier around policies
            ("graphkv(hybrid(h2o, recency), sources=0.2)") or a file ("calibrated:F.safetensors",
            "gate:F.safetensors(keep_above=0.1)"), which may stand inside a modifier, too:
            "hybrid(calibrated:F.safetensors, tova)"; a path with a comma, a parenthesis or a quote is written in quotes
            there. An object's `label` is such a text.

    Raises:
        ValueError: no policy has that name or parameter, a value is out of range, or the text is no policy.
        TypeError: neither a text nor a policy object.
    """
    return POLICIES.make(policy)
