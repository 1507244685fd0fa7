"""What is made of a text and tells that text."""

from typing import ClassVar

from .spelling import spell


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
        return spell(self)

    def __str__(self) -> str:
        return self.label
