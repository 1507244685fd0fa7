"""The base class of objects that are made from text."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from .parsing import format_name


class Named:
    """A policy, an allocator or a disposal: an object with parameters and a name, which can be written as text.

    Class attributes:
        name: registered name.
        paper: arXiv id, or None.
        of_file: whether its first parameter is a file; the text is then `name:file`.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None
    of_file: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The text of this object, such as `snapkv(window=16)`. Parameters with their default values are left out."""
        return format_name(self)

    def __str__(self) -> str:
        return self.label

    @staticmethod
    def is_here(file: str) -> bool:
        """Whether this file is on this machine, for classes with `of_file`."""
        return Path(file).is_file()

    @property
    def file_digests(self) -> Mapping[str, str]:
        """Digests of the files that this object reads, by name."""
        from .digests import file_digest  # imports torch

        name = getattr(self, "file", None)
        return {name: file_digest(name)} if self.of_file and isinstance(name, str) and Path(name).is_file() else {}
