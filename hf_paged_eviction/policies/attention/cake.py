"""The token score of CAKE, arXiv 2503.12491."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ...attention.weights import Attention
from ..base import ScoreContext
from ..checks import check_between, check_count, check_kernel
from ..needs import Needs
from ..registry import register_policy
from .window_attention import WindowAttention, over_group


@register_policy("cake")
@dataclass(frozen=True)
class Cake(WindowAttention):
    r"""Attention of the last `window` queries, its mean and how much it shifts from query to query, pooled.

    .. math:: s_t = \operatorname{pool}_{u \text{ near } t} \bigl( \bar a_u + \gamma \operatorname{var}_q a_{q,u} \bigr)

    The variance is taken over the queries of all query heads of a group; the authors' code takes it per query head and
    averages, which would need numbers per query head. Neighbours are the nearest tokens held. The tokens of the window
    are pinned, so a budget should be well above it. Made for `allocator="cake"`, which shares out among the layers.

    Args:
        gamma: weight of the variance.
        window: queries observed.
        kernel: tokens pooled, odd; 1 = no pooling.

    Raises:
        ValueError: a parameter is out of range.
    """

    gamma: float = 200.0
    window: int = 32
    kernel: int = 5

    paper: ClassVar[str | None] = "2503.12491"

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0)
        check_count("window", self.window, at_least=2)
        check_kernel("kernel", self.kernel)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, token_statistics=("current", "previous", "current_squares", "previous_squares"))

    def summed(self, attention: Attention, chosen: Tensor) -> dict[str, Tensor]:
        weights = attention.weights
        return {"": over_group(weights, chosen), "_squares": over_group(weights.square(), chosen)}

    def attention(self, context: ScoreContext) -> Tensor:
        return self.pooled(self.mean(context), context, self.kernel, "avg")

    def score(self, context: ScoreContext) -> Tensor:
        mean = self.mean(context)
        variance = (self.mean(context, "_squares") - mean.square()).clamp_min(0) * (self.window / (self.window - 1))
        scores = self.pooled(mean + self.gamma * variance, context, self.kernel, "avg")
        return self.with_window(scores, context)
