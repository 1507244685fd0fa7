"""Least recently used."""

from dataclasses import dataclass

from torch import Tensor

from ..queries.weights import Attention
from .checks import check_count
from .hits import LastHit, among_the_top
from .registry import register_policy


@register_policy("lru")
@dataclass(frozen=True)
class LRU(LastHit):
    r"""How recently the token was among the `top` most attended of a query: the least recently used goes first.

    .. math:: s_t = -\min \{ \text{now} - q : t \text{ is among the top of } a^h_q \text{ for some } h \}

    Minus the number of tokens since that query. Any query head of the group counts. The textbook rule of caches; what
    "used" means for a token is our definition, as no paper gives one.

    Args:
        top: tokens that a query of one head uses.

    Raises:
        ValueError: `top` is not a whole number above 0.
    """

    top: int = 8

    def __post_init__(self) -> None:
        check_count("top", self.top, at_least=1)

    def hits(self, attention: Attention) -> Tensor:
        return among_the_top(attention, self.top)
