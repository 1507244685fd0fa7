"""Policies made of other policies."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ..queries.weights import Attention
from .base import EvictionPolicy, ScoreContext, Statistics
from .spelling import spell


class Modifier(EvictionPolicy):
    """Changes or joins the scores of other policies, its parts.

    Keeps their statistics for them, those of part `n` under names that begin with `n.`. Each part sees its own only.
    All parts are shown the same queries: where one needs the whole prompt, the others get more than their window.

    Class attributes:
        example: how to write it.
    """

    example: ClassVar[str]

    @property
    @abstractmethod
    def parts(self) -> tuple[EvictionPolicy, ...]:
        """The policies inside."""

    @property
    def label(self) -> str:
        return spell(self, self.parts)

    def check_model(self, config: Any) -> None:
        for part in self.parts:
            part.check_model(config)

    @property
    def token_statistics(self) -> tuple[str, ...]:
        return tuple(f"{at}.{name}" for at, part in enumerate(self.parts) for name in part.token_statistics)

    @property
    def row_statistics(self) -> tuple[str, ...]:
        return tuple(f"{at}.{name}" for at, part in enumerate(self.parts) for name in part.row_statistics)

    @property
    def decision_interval(self) -> int:
        return max(part.decision_interval for part in self.parts)

    @property
    def observes_decode(self) -> bool:
        return any(part.observes_decode for part in self.parts if part.needs_queries)

    @property
    def needs_queries(self) -> bool:
        return super().needs_queries or any(part.needs_queries for part in self.parts)

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]  # depends on the parts
        """Whether any part does."""
        return any(part.needs_rotary for part in self.parts)

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]  # depends on the parts
        """Whether any part that observes does."""
        return any(part.reads_weights for part in self.parts if part.needs_queries)

    @property
    def absolute_noise(self) -> bool:  # type: ignore[override]  # depends on the parts
        """Whether the scores of some part have it."""
        return any(part.absolute_noise for part in self.parts)

    @property
    def reads_budget(self) -> bool:  # type: ignore[override]  # depends on the parts
        """Whether the scores of some part depend on it."""
        return any(part.reads_budget for part in self.parts)

    @property
    def supports_mla(self) -> bool:  # type: ignore[override]  # depends on the parts
        """Whether all parts do."""
        return all(part.supports_mla for part in self.parts)

    @property
    def window(self) -> int | None:
        widest = 0
        for part in self.parts:
            if part.needs_queries:
                if part.window is None:
                    return None
                widest = max(widest, part.window)
        return widest or None

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        after: Statistics = {}
        for at, part in enumerate(self.parts):
            if part.needs_queries:
                own = part.observe(_of_part(at, statistics), attention)
                after |= {f"{at}.{name}": value for name, value in own.items()}
        return after

    def contexts(self, context: ScoreContext) -> Iterator[ScoreContext]:
        """What each part is to score."""
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
