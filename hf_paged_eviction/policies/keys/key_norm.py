"""Inverse key L2 norm, arXiv 2406.11430."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy


@register_policy("key_norm")
@dataclass(frozen=True)
class KeyNorm(EvictionPolicy):
    r"""Keeps the tokens with the shortest keys, which attract the most attention in large models.

    .. math:: s_t = -\lVert k_t \rVert

    `k` is the key of the token after rotary embedding (a rotation does not change its norm). From arXiv 2406.11430.
    """

    paper: ClassVar[str | None] = "2406.11430"
    needs = Needs(token_local=True, by_layer=False, supports_mla=False)

    def score(self, context: ScoreContext) -> Tensor:
        return -l2_norm(context.keys)
