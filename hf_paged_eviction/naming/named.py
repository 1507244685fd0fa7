"""What is made of a text and tells that text."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from .parsing import format_name


class Named:
    """A policy, an allocator, a disposal or a replacement: parameters, and a name that its registry sets.

    Class attributes:
        name: as registered.
        paper: arXiv id, or None.
        of_file: whether it is made of a file, its first parameter: written `name:file`.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None
    of_file: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The text that this is made of, such as `snapkv(window=16)`; parameters at their default are left out."""
        return format_name(self)

    def __str__(self) -> str:
        return self.label

    @staticmethod
    def is_here(file: str) -> bool:
        """Whether the name of a file stands for one on this machine; of what is made of a file."""
        return Path(file).is_file()

    @property
    def file_digests(self) -> Mapping[str, str]:
        """The digest of each file that this is made of, by the file's name; other contents, other results."""
        from .digests import file_digest  # brings torch

        name = getattr(self, "file", None)
        return {name: file_digest(name)} if self.of_file and isinstance(name, str) and Path(name).is_file() else {}
