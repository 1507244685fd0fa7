"""Make the policy and the allocator of a saved context from their labels."""

from collections.abc import Mapping
from typing import Any, TypeVar

from ..learned.calibration import load_calibration
from ..learned.lookup import find_calibration
from ..naming.named import Named
from ..naming.registry import Registry

T = TypeVar("T", bound=Named)


def made_of(registry: Registry[T], label: object, override: str | T | None, profile: str | None) -> T:
    """Make the object of a label in a file.

    Args:
        registry: registry of policies or of allocators.
        label: label in the file.
        override: object that the caller passed, or its name; its label must be the one in the file. None = make it from
            the label.
        profile: the profile for names that read one.

    Raises:
        ValueError: the object cannot be made here, or `override` differs.
    """
    kind = registry.kind.name
    if not isinstance(label, str):
        raise ValueError(f"its {kind} has no name")
    if override is not None:
        instance = registry.make(override, profile)
        if instance.label != label:
            raise ValueError(f"its {kind} is {label!r}, and {kind}= is {instance.label!r}")
        return instance
    try:
        return registry.make(label, profile)
    except ValueError as error:
        raise ValueError(
            f"its {kind} {label!r} cannot be made here ({error}) Register its class first, or pass {kind}="
        ) from error


def find_profile(saved: object, digest: str, override: str | None, config: Any) -> str:
    """The profile that a context was saved with: the user's, the file of that path, or the one of the weights.

    Args:
        saved: path in the file.
        digest: digest of its content when the context was saved.
        override: the user's path.
        config: `model.config`.

    Raises:
        ValueError: none of these has this content.
    """
    if override is not None:
        load_calibration(override)
        return override  # compared by `check_profile`, where the error names both
    found = find_calibration(config)
    for path in (saved, None if found is None else str(found)):
        try:
            if isinstance(path, str) and load_calibration(path).digest == digest:
                return path
        except ValueError:  # it is not here, or cannot be used
            continue
    raise ValueError(
        f"it was made with the profile {saved!r} (digest {digest}), which is not here, or has changed since. Pass "
        "profile= with the file as it was"
    )


def check_profile(saved: str | None, here: Mapping[str, str]) -> None:
    """Check that the profile has the same content as when the context was saved.

    Args:
        saved: digest in the file.
        here: digests of the profiles of policy and allocator, by path.

    Raises:
        ValueError: it differs.
    """
    if {*here.values()} != ({saved} - {None}):
        raise ValueError(
            f"it was made with a profile of digest {saved}, and here are {dict(here)!r}. Pass profile= with the file "
            "as it was"
        )
