"""Make the policy and the allocator of a saved context from their labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..allocators import BudgetAllocator
from ..allocators.registry import ALLOCATORS
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
        found = saved if Path(saved).is_file() else find_calibration(config)
        if found is None:
            raise ValueError(f"it was made with the profile {saved!r}, which is not here: pass profile= with this file")
        profile = str(found)
    made = (
        _made_of(POLICIES, settings["policy"], policy, profile),
        _made_of(ALLOCATORS, settings["allocator"], allocator, profile),
    )
    here = {**made[0].profile_digests, **made[1].profile_digests}
    if {*here.values()} != ({digest} - {None}):
        raise ValueError(
            f"it was made with the profile {saved!r} of digest {digest}, and here is {here!r}. Pass profile= with the "
            "file as it was, if it has changed since"
        )
    return made


def _made_of(registry: Registry[T], label: str, override: str | T | None, profile: str | None) -> T:
    """The object of a label; the user's, if there is one, must have the same label."""
    kind = registry.kind.name
    try:
        instance = registry.make(override or label, profile)
    except ValueError as error:
        raise ValueError(f"{error} If its class is not registered here, pass {kind}=") from error
    if instance.label != label:
        raise ValueError(f"its {kind} is {label!r}, and {kind}= is {instance.label!r}")
    return instance
