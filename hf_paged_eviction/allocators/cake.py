"""CAKE, arXiv 2503.12491."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention.weights import Attention
from ..policies import Statistics
from ..policies.checks import check_count, check_positive
from .base import LayerAllocator
from .registry import register_allocator


@register_allocator("cake")
@dataclass(frozen=True)
class Cake(LayerAllocator):
    r"""Gives more to layers whose attention is spread out and changes from query to query.

    .. math:: b_\ell = w + (\bar b - w) L \frac{P_\ell}{\sum_m P_m}, \quad P_\ell = H_\ell^{1/\tau_1} V_\ell^{1/\tau_2}

    `H` is the entropy of the attention that the last `w` queries pay the tokens before them, summed over heads and
    queries. `V` is the variance of each token's attention across these queries, summed over tokens and heads. Every
    layer gets at least `w` tokens. From arXiv 2503.12491; the authors' code also sums over the batch, here each row has
    its own shares.

    Args:
        tau1, tau2: temperatures of the entropy and of the variance; the smaller, the more they matter. The authors tune
            them per model and budget; 1 where they did not.
        observed: number of observed queries, `w`.

    Raises:
        ValueError: a parameter is out of range.
    """

    paper: ClassVar[str | None] = "2503.12491"
    token_statistics: ClassVar[tuple[str, ...]] = ("sum", "squares", "entropy", "queries")

    tau1: float = 1.0
    tau2: float = 1.0
    observed: int = 32

    def __post_init__(self) -> None:
        check_positive("tau1", self.tau1)
        check_positive("tau2", self.tau2)
        check_count("observed", self.observed, at_least=2)  # a variance needs two queries

    @property
    def window(self) -> int | None:
        return self.observed

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        weights = attention.weights  # [B, H, G, q, T]
        entropy = -(weights * weights.clamp_min(1e-30).log())
        queries = attention.counts.sum(-1)[:, None, None, None].expand(-1, weights.shape[1], -1, -1)
        return {
            "sum": statistics["sum"] + weights.sum(3),
            "squares": statistics["squares"] + weights.square().sum(3),
            "entropy": statistics["entropy"] + entropy.sum(3),
            "queries": statistics["queries"] + queries,
        }

    def preference(self, statistics: Statistics, positions: Tensor) -> Tensor:
        newest = positions.amax((1, 2), keepdim=True)
        before = ((positions >= 0) & (positions <= newest - self.observed))[:, :, None]
        queries = statistics["queries"].clamp_min(1)
        mean = statistics["sum"] / queries
        variance = (statistics["squares"] / queries - mean.square()).clamp_min(0)
        entropy = (statistics["entropy"] * before).sum((1, 2, 3))
        spread = (variance * before).sum((1, 2, 3))
        return entropy.clamp_min(0) ** (1 / self.tau1) * spread ** (1 / self.tau2)

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        window = min(self.observed, budget)
        shares = preferences / preferences.sum(-1, keepdim=True).clamp_min(1e-30)
        return window + shares * (budget - window) * preferences.shape[-1]
