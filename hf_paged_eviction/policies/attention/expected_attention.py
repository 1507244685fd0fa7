"""Expected Attention, arXiv 2510.00636."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ...tensors.pieces import per_piece
from ..attention_policy import AttentionPolicy
from ..base import ScoreContext, Statistics
from ..checks import check_between, check_count, check_flag
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy
from .fading import fading


@register_policy("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(AttentionPolicy):
    r"""Keeps the tokens to which future queries can be expected to attend, weighted by the norm of the value.

    .. math::

        s_t = (a_t + \epsilon) \lVert v_t \rVert, \quad
        a_t = \operatorname{softmax}_t \bigl( \bar R m \cdot k_t
        + \tfrac{1}{2} k_t^\top \bar R S \bar R^\top k_t \bigr)

    Queries before rotary embedding are modelled as normally distributed, with mean `m` and covariance `S` per query
    head (scaled as in the model's attention). `R` is the rotation averaged over the next `future` positions. `a` is
    averaged over the query heads that share a KV head. The first `n_sink` tokens are pinned, and their queries and keys
    are left out.

    The paper (arXiv 2510.00636) scores once, from the queries of the prompt. Here `m` and `S` also follow the queries
    of the answer, and the next positions are counted from the end of the text at each decision. All queries count the
    same, unless `horizon` is set. Soft-capping of logits is ignored, because its expectation has no closed form.

    Memory per row and layer: (query heads) x dim x (dim + 1) numbers, or (query heads) x dim without the covariance.

    Args:
        future: number of positions to average the rotation over.
        covariance: False leaves `S` out.
        value_norm: False leaves the norm of the value out.
        epsilon: added to the expected attention; at least 0.
        n_sink: number of first tokens of the row that are left out and pinned.
        horizon: number of tokens after which the weight of a query has fallen to 1/e; None = all queries count the
            same.

    Raises:
        ValueError: a parameter is out of range.
    """

    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    n_sink: int = 4
    horizon: int | None = None

    paper: ClassVar[str | None] = "2510.00636"

    def __post_init__(self) -> None:
        check_count("future", self.future, at_least=1)
        check_flag("covariance", self.covariance)
        check_flag("value_norm", self.value_norm)
        check_between("epsilon", self.epsilon, 0)
        check_count("n_sink", self.n_sink)
        if self.horizon is not None:
            check_count("horizon", self.horizon, at_least=1)

    @property
    def needs(self) -> Needs:
        return Needs(
            supports_mla=False,
            rotary=True,
            row_statistics=("newest", "weight", "mean", "scatter") if self.covariance else ("newest", "weight", "mean"),
            window=None if self.horizon is None else 4 * self.horizon,  # older queries weigh less than two percent
            reads_weights=False,
        )

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        counts, keep, newest = fading(statistics, attention, float("inf") if self.horizon is None else self.horizon)
        counts = counts * (attention.query_positions >= self.n_sink)
        queries = attention.unrotated_queries.float() * attention.logits.scaling  # [B, Q, q, D]
        weight = counts.sum(-1)
        mean = (counts[:, None, None] @ queries)[:, :, 0] / weight.clamp_min(1e-20)[:, None, None]
        old_weight = statistics["weight"] * keep if "weight" in statistics else torch.zeros_like(weight)
        old_mean = statistics.get("mean", torch.zeros_like(mean))
        # Two sets of queries are joined by their means and the scatter around them: no large numbers are subtracted.
        share = (weight / (weight + old_weight).clamp_min(1e-20))[:, None, None]
        step = mean - old_mean
        after = {"newest": newest, "weight": weight + old_weight, "mean": old_mean + share * step}
        if self.covariance:
            around = queries - mean[:, :, None]
            scatter = (around * counts[:, None, :, None]).mT @ around
            between = (share * old_weight[:, None, None])[..., None] * step[..., None] * step[..., None, :]
            old = statistics.get("scatter", torch.zeros_like(scatter))
            after["scatter"] = old * keep[:, None, None, None] + scatter + between
        return after

    def attention(self, context: ScoreContext) -> Tensor:
        statistics, heads = context.statistics, context.keys.shape[1]
        if "mean" not in statistics:
            return torch.zeros(context.positions.shape, device=context.positions.device)
        keys = context.keys.float()
        logits = self._ahead(statistics["mean"], context).unflatten(1, (heads, -1)) @ keys.mT  # [B, H, G, T]
        if self.covariance:
            spread = statistics["scatter"] / statistics["weight"].clamp_min(1e-20)[:, None, None, None]
            spread = self._ahead(self._ahead(spread, context).mT, context).unflatten(1, (heads, -1))
            logits = logits + _spread_along(keys, spread) / 2
        rivals = context.valid & (context.positions >= self.n_sink)
        logits = logits.masked_fill(~rivals[:, :, None], float("-inf"))
        expected: Tensor = logits.softmax(-1).nan_to_num(0.0).mean(2)
        return expected

    def _ahead(self, states: Tensor, context: ScoreContext) -> Tensor:
        """States `[B, ..., D]` as they are on average at the next positions."""
        if context.rotary is None:
            return states
        start = context.seen.view(-1, *[1] * (states.ndim - 1))
        return context.rotary.rotate_mean(states, start + torch.arange(self.future, device=start.device))

    def score(self, context: ScoreContext) -> Tensor:
        scores = self.attention(context) + self.epsilon
        scores = scores * l2_norm(context.values) if self.value_norm else scores
        return scores.masked_fill(context.valid & (context.positions < self.n_sink), float("inf"))


def _spread_along(keys: Tensor, spread: Tensor) -> Tensor:
    """`k^T S k` of keys `[B, H, T, D]` and symmetric `S` `[B, H, G, D, D]`: `[B, H, G, T]`.

    The `S` that belong to a KV head stand side by side, because a product with each would copy the keys for each.
    """
    beside = spread.transpose(2, 3).flatten(3)  # [B, H, D, G * D]
    rows, heads, dim, width = beside.shape
    size = per_piece(keys.device, rows * heads * width)
    parts = []
    for piece in keys.split(size, dim=2):
        product = (piece @ beside).unflatten(-1, (-1, dim))  # [B, H, t, G, D]
        parts.append(product.mul_(piece[:, :, :, None]).sum(-1))
    return torch.cat(parts, dim=2).mT
