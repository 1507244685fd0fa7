"""PagedEviction, arXiv 2509.04377."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy


@register_policy("paged_eviction")
@dataclass(frozen=True)
class PagedEviction(EvictionPolicy):
    r"""Keeps tokens with large values and short keys. Short keys attract attention, and attention reads values.

    .. math:: s_t = \frac{\lVert v_t \rVert}{\lVert k_t \rVert}

    `k` is the key, `v` the value. The score of a block is the mean of its tokens' ratios, not the ratio of the means.
    From arXiv 2509.04377.
    """

    paper: ClassVar[str | None] = "2509.04377"
    needs = Needs(token_local=True, by_layer=False, supports_mla=False)

    def score(self, context: ScoreContext) -> Tensor:
        return l2_norm(context.values) / l2_norm(context.keys).clamp_min(1e-6)
