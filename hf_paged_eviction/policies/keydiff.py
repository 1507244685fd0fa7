"""KeyDiff, arXiv 2504.15364."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from .base import EvictionPolicy, ScoreContext
from .norms import l2_norm
from .registry import register_policy


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    r"""`-cos(K, mean of the normalised keys)`: keep the most distinctive keys of each KV head.

    .. math:: s_t = -\cos\Bigl(k_t, \sum_u \frac{k_u}{\lVert k_u \rVert}\Bigr)
    """

    paper: ClassVar[str | None] = "2504.15364"

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.keys.float()
        inverse = l2_norm(keys).clamp_min(1e-12).reciprocal() * context.valid
        # The direction of the sum is that of the mean, so the count of valid tokens is not needed.
        anchor = normalize(inverse[:, :, None] @ keys, dim=-1)
        return -(keys @ anchor.mT)[..., 0] * inverse
