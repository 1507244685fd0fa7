"""The base class of objects that are made from text."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from .parsing import format_name


class Named:
    """A policy, an allocator or a disposal: an object with parameters and a name, which can be written as text.

    Class attributes:
        name: registered name.
        paper: arXiv id, or None.
        reads_profile: whether it has a parameter `profile`, the file of `prepare` that it reads. It is not written into
            the text: `make` takes it as an argument of its own.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None
    reads_profile: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The text of this object, such as `snapkv(window=16)`. Parameters with their default values are left out."""
        return format_name(self)

    def __str__(self) -> str:
        return self.label

    @property
    def profile_digests(self) -> Mapping[str, str]:
        """The profile that this object reads, with the digest of its content; empty if it reads none."""
        return MappingProxyType({})
