"""KeyDiff, arXiv 2504.15364."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from .base import EvictionPolicy, ScoreContext
from .registry import register_policy


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    """`-cos(K, mean of the normalised keys)`: keep the most distinctive keys of each KV head."""

    paper: ClassVar[str | None] = "2504.15364"

    def score(self, context: ScoreContext) -> Tensor:
        unit = normalize(context.keys.float(), dim=-1)
        # The direction of the sum is that of the mean, so the count of valid tokens is not needed.
        anchor = (unit * context.valid[..., None]).sum(dim=-2, keepdim=True)
        return -(unit * normalize(anchor, dim=-1)).sum(dim=-1)
