"""Attention of the last few queries."""

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import ScoreContext, Statistics
from ..needs import Needs
from .recent_window import RecentWindow


class WindowAttention(RecentWindow):
    """Sums the attention of the row's last `window` queries.

    There are two sums, each over a span of `window` positions: the span that is being filled and the one before it. If
    the current span has fewer queries than a window, the average of the span before it stands for the missing ones. So
    the window is exact after a prompt, of which the cache shows just `window` queries; while decoding its older part is
    an estimate. No query is stored, and the result does not depend on how many pieces the queries come in.
    """

    @property
    def needs(self) -> Needs:
        return Needs(
            token_statistics=("current", "previous"),
            row_statistics=("newest", "current_queries", "previous_queries"),
            window=self.window,
        )

    def summed(self, attention: Attention, chosen: Tensor) -> dict[str, Tensor]:
        """Join query heads and add up queries.

        Args:
            attention: `q` queries.
            chosen: `[batch, sums, q]`, 1 for a query that counts and 0 for the others.

        Returns:
            `[batch, kv_heads, sums, tokens]` for each kind of sum; "" is the attention itself.
        """
        return {"": over_group(attention.weights, chosen)}

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        positions, counts = attention.query_positions, attention.counts
        none = torch.zeros(len(positions), device=positions.device)
        before = statistics.get("newest", none - 1)
        newest = torch.maximum(before, positions.amax(-1).float())
        span = newest.long().div(self.window, rounding_mode="floor")
        steps = (span - before.long().div(self.window, rounding_mode="floor"))[:, None]
        spans = positions.div(self.window, rounding_mode="floor").masked_fill(~counts, -2)
        same_span, aged = (steps == 0).float(), (steps == 1).float()
        after = {"newest": newest}
        chosen = torch.stack([spans == span[:, None], spans == span[:, None] - 1], dim=1) & counts[:, None]
        sums, queries = self.summed(attention, chosen.float()), chosen.sum(-1).float()
        for at, name in enumerate(("current", "previous")):
            for kind, numbers in sums.items():
                after[name + kind] = numbers[:, :, at] + statistics[name + kind] * same_span[:, :, None]
            after[f"{name}_queries"] = queries[:, at] + statistics.get(f"{name}_queries", none) * same_span[:, 0]
        for kind in sums:
            after["previous" + kind] = after["previous" + kind] + statistics["current" + kind] * aged[:, :, None]
        after["previous_queries"] = after["previous_queries"] + statistics.get("current_queries", none) * aged[:, 0]
        return after

    def mean(self, context: ScoreContext, kind: str = "") -> Tensor:
        """One kind of sum per query of the window that could see the token, `[batch, kv_heads, tokens]`."""
        statistics = context.statistics
        if "newest" not in statistics:
            return torch.zeros(context.positions.shape, device=context.positions.device)
        missing = (self.window - statistics["current_queries"]).clamp_min(0)
        share = (missing / statistics["previous_queries"].clamp_min(1)).clamp_max(1)
        queries = statistics["current_queries"] + share * statistics["previous_queries"]
        later = statistics["newest"][:, None, None] + 1 - context.positions
        total = statistics["current" + kind] + share[:, None, None] * statistics["previous" + kind]
        return total / torch.minimum(later, queries[:, None, None]).clamp_min(1)


def over_group(weights: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the query heads of a group, sum over the chosen queries.

    Args:
        weights: `[batch, kv_heads, G, q, tokens]`.
        chosen: `[batch, sums, q]`, 1 or 0.

    Returns:
        `[batch, kv_heads, sums, tokens]`.
    """
    group = weights.shape[2]
    # One product over query heads and queries, which reads the weights once.
    return (chosen / group).repeat(1, 1, group)[:, None] @ weights.flatten(2, 3)
