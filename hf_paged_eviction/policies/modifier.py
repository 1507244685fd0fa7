"""Policies made of other policies."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ..attention.weights import Attention
from ..naming import format_name
from .base import EvictionPolicy, ScoreContext, Statistics
from .needs import Needs


class Modifier(EvictionPolicy):
    """A policy that changes or combines the scores of other policies, its parts.

    It stores the statistics of part `n` under names that begin with `n.`; each part sees its own statistics only. All
    parts observe the same queries: if one of them needs the whole prompt, the others get more than their window.

    Class attributes:
        example: how to write it as text.
    """

    example: ClassVar[str]

    @property
    @abstractmethod
    def parts(self) -> tuple[EvictionPolicy, ...]:
        """The policies inside this one, in the order of its parameters."""

    @property
    def label(self) -> str:
        return format_name(self, self.parts)

    @property
    def profile_digests(self) -> Mapping[str, str]:
        return {name: digest for part in self.parts for name, digest in part.profile_digests.items()}

    def check_model(self, config: Any) -> None:
        for part in self.parts:
            part.check_model(config)

    @property
    def needs(self) -> Needs:
        """The combined needs of the parts; use `dataclasses.replace` if the modifier needs more."""
        return Needs.together([part.needs for part in self.parts])

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        after: Statistics = {}
        for at, part in enumerate(self.parts):
            if part.needs.queries:
                own = part.observe(_of_part(at, statistics), attention)
                after |= {f"{at}.{name}": value for name, value in own.items()}
        return after

    def contexts(self, context: ScoreContext) -> Iterator[ScoreContext]:
        """The context for each part."""
        for at in range(len(self.parts)):
            yield replace(context, statistics=_of_part(at, context.statistics))

    def part_scores(self, context: ScoreContext) -> list[Tensor]:
        """The score of each part."""
        return [part.score(own) for part, own in zip(self.parts, self.contexts(context), strict=True)]

    def _check_parts(self) -> None:
        for part in self.parts:
            if not isinstance(part, EvictionPolicy):
                raise TypeError(
                    f"{type(self).__name__} is made around policy objects, got {part!r}. Give an object, or let "
                    f"make_policy read a text such as {self.example!r}."
                )


def _of_part(at: int, statistics: Mapping[str, Any]) -> dict[str, Any]:
    own = f"{at}."
    return {name[len(own) :]: value for name, value in statistics.items() if name.startswith(own)}
