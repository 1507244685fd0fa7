"""Make the policy and the allocator of a saved context from their labels."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..naming.named import Named
from ..naming.parsing import NameParseError, ParsedName
from ..naming.registry import Registry

T = TypeVar("T", bound=Named)


def made_of(registry: Registry[T], label: object, override: str | T | None) -> T:
    """Make the object of a label in a file. Nothing is downloaded.

    Args:
        registry: registry of policies or of allocators.
        label: label in the file.
        override: object that the caller passed, or its name; its label must be the one in the file. None = make it from
            the label.

    Raises:
        ValueError: the object cannot be made here, or `override` differs.
    """
    kind = registry.kind.name
    if not isinstance(label, str):
        raise ValueError(f"its {kind} has no name")
    if override is not None:
        instance = registry.make(override)
        if instance.label != label and not _another_file(registry, instance.label, label):
            raise ValueError(f"its {kind} is {label!r}, and {kind}= is {instance.label!r}")
        return instance
    for name, file in _files(registry, label):
        cls: Any = registry.find(name) or registry.base
        if not cls.is_here(file):
            raise ValueError(f"its {kind} {label!r} needs the file {file!r}, which is not here: pass {kind}=")
    try:
        return registry.make(label)
    except ValueError as error:
        raise ValueError(
            f"its {kind} {label!r} cannot be made here ({error}) Register its class first, or pass {kind}="
        ) from error


def check_files(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Check that the files of policy and allocator have the same content as when the context was saved.

    Args:
        saved, here: digests by the name of the file.

    Raises:
        ValueError: a file differs.
    """
    if list(saved.values()) != list(here.values()):
        raise ValueError(
            f"what its policy or allocator is made of has changed since it was saved: digests {dict(saved)!r} in the "
            f"file, {dict(here)!r} here. Pass policy= or allocator= with the file as it was"
        )


def _another_file(registry: Registry[T], here: str, label: str) -> bool:
    """Whether two labels differ at most in the paths of their files."""

    def plain(text: str) -> list[ParsedName]:
        return [replace(parsed, file=parsed.file and "", column=0, hosts=()) for parsed in _parts(registry, text)]

    return plain(here) == plain(label) != []


def _files(registry: Registry[T], label: str) -> list[tuple[str, str]]:
    """The files, or names on the Hub, that this label needs, each with the name of the class that reads it."""
    parts = _parts(registry, label)
    files = [(part.name, part.file) for part in parts if part.file is not None]
    return files + [(part.name, str(part.parameters["file"])) for part in parts if "file" in part.parameters]


def _parts(registry: Registry[T], label: str) -> list[ParsedName]:
    """The parsed label, and all labels inside it."""
    try:
        left = [registry.read(label)]
    except NameParseError:  # the user's own class may have any name
        return []
    parts: list[ParsedName] = []
    while left:
        parsed = left.pop()
        left += parsed.hosts
        parts.append(parsed)
    return parts
