"""One policy or another, by what attention looks like."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..attention.fading import fading
from ..base import EvictionPolicy, ScoreContext, Statistics
from ..checks import check_between, check_count
from ..modifier import Modifier
from ..needs import Needs
from ..registry import register_policy

#: Statistics of the entropy.
_ROWS = ("newest", "entropy", "weight")


@register_policy("adaptive")
@dataclass(frozen=True)
class Adaptive(Modifier):
    r"""Uses one policy where attention is focused and another where it is spread out.

    .. math::

        s_t = \begin{cases} s^\text{focused}_t & E < \text{threshold} \\ s^\text{spread}_t & \text{otherwise}
        \end{cases}, \quad E = \operatorname{mean}_{q,h} \frac{-\sum_u a^h_{q,u} \log a^h_{q,u}}{\log |a^h_q|}

    `E` is the entropy of the attention of each query and query head, divided by its maximum, the logarithm of the
    number of visible tokens: 0 = one token gets everything, 1 = all get the same. It is averaged over the query heads
    of the layer, and over queries with weight `exp(-age / horizon)`. `spread` also decides before any query was
    observed. Each row and layer switches separately, and may switch back. From no paper.

    Args:
        focused: policy for entropies below `threshold`, such as one that decides by attention.
        spread: policy for the others.
        threshold: entropy, from 0 (always `spread`) to 1 (nearly always `focused`).
        horizon: number of tokens after which the weight of a query has fallen to 1/e.

    Raises:
        ValueError: a parameter is out of range.
        TypeError: `focused` or `spread` is not a policy.
    """

    focused: EvictionPolicy
    spread: EvictionPolicy
    _: KW_ONLY
    threshold: float = 0.5
    horizon: int = 64

    example: ClassVar[str] = "adaptive(h2o, paged_eviction, threshold=0.4)"

    def __post_init__(self) -> None:
        self._check_parts()
        check_between("threshold", self.threshold, 0, 1)
        check_count("horizon", self.horizon, at_least=1)

    @property
    def parts(self) -> tuple[EvictionPolicy, ...]:
        return self.focused, self.spread

    @property
    def needs(self) -> Needs:
        own = Needs(row_statistics=_ROWS, window=4 * self.horizon)  # older queries weigh less than two percent
        joined = Needs.together([*(part.needs for part in self.parts), own])
        # Names of the parts' statistics begin with the number of the part; its own do not.
        return replace(joined, row_statistics=(*super().needs.row_statistics, *_ROWS))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        after = super().observe(statistics, attention)
        counts, keep, newest = fading(statistics, attention, self.horizon)
        entropy = (_entropy(attention) * counts).sum(-1)
        zero = torch.zeros_like(entropy)
        after["newest"] = newest
        after["entropy"] = statistics.get("entropy", zero) * keep + entropy
        after["weight"] = statistics.get("weight", zero) * keep + counts.sum(-1)
        return after

    def score(self, context: ScoreContext) -> Tensor:
        focused, spread = self.part_scores(context)
        if "weight" not in context.statistics:
            return spread
        entropy, weight = context.statistics["entropy"], context.statistics["weight"]
        return torch.where((entropy < self.threshold * weight)[:, None, None], focused, spread)


def _entropy(attention: Attention) -> Tensor:
    """`[batch, q]`, mean over heads, from 0 to 1."""
    weights = attention.weights
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)  # attention sinks take part of the weight
    entropy = torch.special.entr(weights).sum(-1)  # [B, H, G, q]
    most = attention.visible.sum(-1).clamp_min(2).log()
    return attention.all_heads((entropy / most).mean(2)).mean(1)
