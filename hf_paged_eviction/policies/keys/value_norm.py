"""Value L2 norm: the numerator of PagedEviction's score."""

from dataclasses import dataclass

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy


@register_policy("value_norm")
@dataclass(frozen=True)
class ValueNorm(EvictionPolicy):
    r"""Keeps the tokens with the largest values, which contribute most when they are attended to.

    .. math:: s_t = \lVert v_t \rVert

    `v` is the value. This is the numerator of the score of `paged_eviction`; it comes from no paper.
    """

    needs = Needs(heads="separate", token_local=True, by_layer=False, supports_mla=False)

    def score(self, context: ScoreContext) -> Tensor:
        return l2_norm(context.values)
