"""R-KV, arXiv 2505.24133."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import ScoreContext
from .checks import check_between, check_count, check_kernel
from .redundancy import redundancy
from .registry import register_policy
from .window_attention import WindowAttention


@register_policy("r_kv")
@dataclass(frozen=True)
class RKV(WindowAttention):
    r"""Attention of the last queries minus redundancy of the key: of near duplicates, the latest is worth most.

    .. math:: s_t = \lambda I_t - (1 - \lambda) R_t, \quad \lambda = \text{balance}

    `balance * I - (1 - balance) * R`. `I` is the attention of the last `window` queries, the largest of the query heads
    of a group, brought to a sum of one and max-pooled over neighbours; the authors' code takes the maximum and the
    softmax the other way round. `R` is the softmax over tokens of each key's mean cosine similarity to the others,
    where each token spares the latest of those more similar than `threshold`. It compares all tokens held with each
    other: the most expensive of all policies. Acts when a block is full, not every 128 tokens.

    Args:
        balance: weight of attention, 0.1 in the authors' readme (0.07 in their code).
        window: queries observed.
        kernel: tokens pooled, odd.
        threshold: similarity above which a key is a near duplicate.

    Raises:
        ValueError: a parameter is out of range.
    """

    balance: float = 0.1
    window: int = 8
    kernel: int = 7
    threshold: float = 0.5

    paper: ClassVar[str | None] = "2505.24133"
    absolute_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between("balance", self.balance, 0, 1)
        check_count("window", self.window, at_least=1)
        check_kernel("kernel", self.kernel)
        check_between("threshold", self.threshold, -1, 1)

    def summed(self, weights: Tensor, chosen: Tensor) -> Tensor:
        return chosen[:, None] @ weights.amax(2)

    def attention(self, context: ScoreContext) -> Tensor:
        mean = self.mean(context) * context.valid
        shares = mean / mean.sum(-1, keepdim=True).clamp_min(1e-20)
        return self.pooled(shares, context, self.kernel, "max")

    def score(self, context: ScoreContext) -> Tensor:
        similar = redundancy(context.keys, context.positions, self.threshold)
        redundant = similar.masked_fill(~context.valid, float("-inf")).softmax(-1).nan_to_num(0.0)
        return self.balance * self.attention(context) - (1 - self.balance) * redundant
