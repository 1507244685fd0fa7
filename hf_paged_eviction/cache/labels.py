"""Make the policy and the allocator of a saved context from their labels."""

from collections.abc import Mapping
from typing import Any, TypeVar

from ..allocators import BudgetAllocator
from ..allocators.registry import ALLOCATORS
from ..learned.calibration import load_calibration
from ..learned.lookup import find_calibration
from ..naming.named import Named
from ..naming.registry import Registry
from ..policies import EvictionPolicy
from ..policies.registry import POLICIES

T = TypeVar("T", bound=Named)


def choosers(
    content: Mapping[str, Any],
    policy: str | EvictionPolicy | None,
    allocator: str | BudgetAllocator | None,
    profile: str | None,
    config: Any,
) -> tuple[EvictionPolicy, BudgetAllocator]:
    """The policy and the allocator of a context.

    Args:
        content: of the file.
        policy, allocator, profile: of the user, see `PagedEvictionCache.load`.
        config: `model.config`.

    Raises:
        ValueError: one cannot be made here, differs from the user's, or its profile is not here, or differs.
    """
    settings, (saved, digest) = content["settings"], content["profile"]
    if saved is not None and profile is None:
        profile = _find_profile(saved, digest, config)
    made = (
        _made_of(POLICIES, settings["policy"], policy, profile),
        _made_of(ALLOCATORS, settings["allocator"], allocator, profile),
    )
    here = {**made[0].profile_digests, **made[1].profile_digests}
    if {*here.values()} != ({digest} - {None}):
        raise ValueError(
            f"it was made with the profile {saved!r} of digest {digest}, and here are the digests {here!r}. Pass "
            "profile= with the file as it was"
        )
    return made


def _made_of(registry: Registry[T], label: str, override: str | T | None, profile: str | None) -> T:
    """The object of a label; the user's, if there is one, must have the same label."""
    kind = registry.kind.name
    try:
        instance = registry.make(label if override is None else override, profile)
    except ValueError as error:
        if override is not None:
            raise
        raise ValueError(
            f"its {kind} {label!r} cannot be made here ({error}) Register its class first, or pass {kind}="
        ) from error
    if instance.label != label:
        raise ValueError(f"its {kind} is {label!r}, and {kind}= is {instance.label!r}")
    return instance


def _find_profile(saved: str, digest: str, config: Any) -> str:
    """The profile of a context: the file of its path, or that of the weights, if the content is the same."""
    for path in (saved, find_calibration(config)):
        try:
            if path is not None and load_calibration(path).digest == digest:
                return str(path)
        except ValueError:  # it is not here, or cannot be used
            continue
    raise ValueError(
        f"it was made with the profile {saved!r} (digest {digest}), which is not here, or has changed since. Pass "
        "profile= with the file as it was"
    )
