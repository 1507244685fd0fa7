"""CAKE, arXiv 2503.12491."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention_rows import Attention
from ..policies import Statistics
from .base import LayerAllocator
from .registry import register_allocator


@register_allocator("cake")
@dataclass(frozen=True)
class Cake(LayerAllocator):
    r"""Layers whose attention is spread out, and shifts from query to query, get more.

    .. math:: b_\ell \propto H_\ell^{1/\tau_1} V_\ell^{1/\tau_2}

    Preference `H ** (1 / tau1) * V ** (1 / tau2)` over the last `window` queries: `H` the entropy of their attention
    (summed over heads and queries), `V` the variance of each token's attention across the queries (summed over tokens
    and heads). The paper sums over the batch as well; here each row has shares of its own.

    Args:
        tau1, tau2: weight of entropy and of variance; small = strong. The paper tunes them per model and budget.
        observed: queries looked at.

    Raises:
        ValueError: a parameter is out of range.
    """

    paper: ClassVar[str | None] = "2503.12491"

    tau1: float = 1.6
    tau2: float = 0.4
    observed: int = 32

    def __post_init__(self) -> None:
        if self.tau1 <= 0 or self.tau2 <= 0:
            raise ValueError(f"tau1 and tau2 must be positive, got {self.tau1} and {self.tau2}.")
        if self.observed < 2:
            raise ValueError(f"observed must be at least 2 queries, a variance needs them; got {self.observed}.")

    @property
    def window(self) -> int | None:
        return self.observed

    @property
    def token_statistics(self) -> tuple[str, ...]:
        return ("sum", "squares", "entropy", "queries")

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        weights = attention.weights
        entropy = -(weights * weights.clamp_min(1e-30).log())
        return {
            "sum": statistics["sum"] + weights.mean(2).sum(2),
            "squares": statistics["squares"] + weights.mean(2).square().sum(2),
            "entropy": statistics["entropy"] + entropy.mean(2).sum(2),
            "queries": statistics["queries"] + attention.counts.sum(-1)[:, None, None],
        }

    def preference(self, statistics: Statistics, valid: Tensor) -> Tensor:
        queries = statistics["queries"].clamp_min(1)
        mean = statistics["sum"] / queries
        variance = (statistics["squares"] / queries - mean.square()).clamp_min(0)
        entropy = statistics["entropy"].masked_fill(~valid, 0).sum((1, 2))
        spread: Tensor = variance.masked_fill(~valid, 0).sum((1, 2))
        return entropy.clamp_min(0) ** (1 / self.tau1) * spread ** (1 / self.tau2)
