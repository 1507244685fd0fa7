"""Scissorhands, arXiv 2305.17118."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..queries.weights import Attention
from .checks import check_count
from .hits import LastHit, above_percentile
from .needs import Needs
from .registry import register_policy


@register_policy("scissorhands")
@dataclass(frozen=True)
class Scissorhands(LastHit):
    r"""How recently a query paid the token more than 90 percent of the others: what mattered will matter again.

    .. math:: s_t = -\min \{ \text{now} - q : a^h_{q,t} > P_{90}(a^h_q) \text{ for some } h \}

    Minus the number of tokens since that query. Any query head of the group counts. The authors' code only asks
    whether there was such a query among the last few; the order among those that pass, and the number dropped at once,
    are not in it. Its newest tokens are safe, which here is the cache's newest block.

    Args:
        window: queries observed at the end of a prompt. Ours: the paper's value is unknown to us.
        percentile: of a query head's weights over the tokens it sees.

    Raises:
        ValueError: a parameter is out of range.
    """

    window: int = 64
    percentile: int = 90

    paper: ClassVar[str | None] = "2305.17118"

    def __post_init__(self) -> None:
        check_count("window", self.window, at_least=1)
        check_count("percentile", self.percentile, at_least=1)
        if self.percentile > 99:
            raise ValueError(f"percentile must be at most 99, got {self.percentile!r}.")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, window=self.window)

    def hits(self, attention: Attention) -> Tensor:
        return above_percentile(attention, self.percentile)
