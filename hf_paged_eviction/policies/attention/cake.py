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
    r"""Keeps the tokens that the last `window` queries attend to, by the mean and the variance of their attention.

    .. math:: s_t = \operatorname{pool}_{u \text{ near } t} \bigl( \bar a_u + \gamma \operatorname{var}_q a_{q,u} \bigr)

    The mean and the variance of the attention `a` are taken over the last `window` queries, and `gamma` weights the
    variance. `pool` averages over the `kernel` nearest held tokens. From arXiv 2503.12491; the authors' code takes the
    variance per query head and averages, here it is taken over the queries of all query heads that share a KV head.

    The tokens of the window are pinned, so the budget should be well above `window`. The paper combines this score with
    `allocator="cake"`.

    Args:
        gamma: weight of the variance.
        window: number of observed queries.
        kernel: number of pooled tokens, odd; 1 = no pooling.

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
