"""Expected Attention, arXiv 2510.00636."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention_rows import Attention
from .attention_policy import AttentionPolicy
from .base import ScoreContext, Statistics
from .checks import check_count, check_flag
from .fading import fading
from .norms import l2_norm
from .registry import register_policy


@register_policy("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(AttentionPolicy):
    r"""The attention that queries like the recent ones can be expected to pay, times the norm of the value.

    .. math:: s_t = \lVert v_t \rVert \operatorname{softmax}_t \bigl( m k_t + \frac{1}{2} k_t^\top S k_t \bigr)

    Queries are taken as normally distributed: with mean `m` and covariance `S` per query head (the model's scaling
    included) the expected weight is the softmax over tokens of `m.k + k.S.k / 2`, averaged over a group.

    The paper takes `m` and `S` before rotary embedding and rotates them to the next 512 positions. A policy knows
    nothing of a model's rotary embedding (frequencies, scaling, share of the head), and guessing them would be wrong
    without a sign. So here `m` and `S` are those of the rotated queries, weighted by `exp(-age / horizon)`: the last
    few hundred positions stand for the next few hundred. Fast rotations average out in both, slow ones hardly turn
    in between; for those of a period near the horizon the expectation lags. Soft-capping of logits is ignored. The
    paper acts once, after the prompt; here the average follows the text.

    Memory per row and layer, in numbers: query heads x dim x (dim + 1), or query heads x dim without covariance.

    Args:
        horizon: tokens after which a query counts 1/e.
        covariance: False leaves `S` out.
        n_sink: first queries of the row that are left out, as outliers.

    Raises:
        ValueError: a parameter is out of range.
    """

    horizon: int = 512
    covariance: bool = True
    n_sink: int = 4

    paper: ClassVar[str | None] = "2510.00636"
    supports_mla: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("horizon", self.horizon, at_least=1)
        check_flag("covariance", self.covariance)
        check_count("n_sink", self.n_sink)

    @property
    def row_statistics(self) -> tuple[str, ...]:
        return ("newest", "weight", "mean", "scatter") if self.covariance else ("newest", "weight", "mean")

    @property
    def window(self) -> int | None:
        return 4 * self.horizon  # what lies before counts for less than two percent

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        counts, keep, newest = fading(statistics, attention, self.horizon)
        counts = counts * (attention.query_positions >= self.n_sink)
        queries = attention.queries.float() * attention.logits.scaling  # [B, Q, q, D]
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
        known, heads = context.statistics, context.keys.shape[1]
        if "mean" not in known:
            return torch.zeros(context.positions.shape, device=context.positions.device)
        keys = context.keys.float()
        logits = known["mean"].unflatten(1, (heads, -1)) @ keys.mT  # [B, H, G, T]
        if self.covariance:
            spread = known["scatter"] / known["weight"].clamp_min(1e-20)[:, None, None, None]
            spread = spread.unflatten(1, (heads, -1))
            logits = logits + ((keys[:, :, None] @ spread) * keys[:, :, None]).sum(-1) / 2
        logits = logits.masked_fill(~context.valid[:, :, None], float("-inf"))
        expected: Tensor = logits.softmax(-1).nan_to_num(0.0).mean(2)
        return expected

    def score(self, context: ScoreContext) -> Tensor:
        return self.attention(context) * l2_norm(context.values)
