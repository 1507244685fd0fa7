"""GraphKV, arXiv 2509.00388."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...ranking import without_noise
from ..base import EvictionPolicy, ScoreContext
from ..checks import check_between, check_count
from ..modifier import Modifier
from ..redundancy import piece_size, unit_keys
from ..registry import register_policy
from ..text_order import best_first

#: Largest similarity that counts, and smallest product of factors, so that no score becomes zero.
_MOST_SIMILAR = 0.99
_LEAST_LEFT = 1e-6


@register_policy("graphkv")
@dataclass(frozen=True)
class GraphKV(Modifier):
    r"""Lowers another policy's score of tokens whose keys resemble those of better tokens, so that less is held twice.

    .. math:: s_t = s^\text{host}_t \prod_{u \text{ lowers } t} \bigl( 1 - \max(0, \cos(k_t, k_u)) \bigr)

    In each row and KV head, the share `sources` of tokens with the highest scores are sources. Each source lowers the
    scores of its `neighbours` most similar tokens among those with a lower score, by a factor of one minus the cosine
    similarity of the keys (negative similarities count as 0). There is one round, from the scores of `host`. If scores
    are negative, all are shifted so that the lowest is 0. Tokens that `host` pins stay pinned.

    In arXiv 2509.00388 the number of sources is about 0.3 times the budget. Here it is a share of the scored tokens,
    which is the same once the storage is full. The paper's number of neighbours is not known to us.

    Args:
        host: any policy.
        sources: share of the tokens that lower others.
        neighbours: number of tokens that a source lowers.

    Raises:
        ValueError: a parameter is out of range.
        TypeError: `host` is not a policy.
    """

    host: EvictionPolicy
    _: KW_ONLY
    sources: float = 0.3
    neighbours: int = 8

    paper: ClassVar[str | None] = "2509.00388"
    example: ClassVar[str] = "graphkv(snapkv, sources=0.2)"

    def __post_init__(self) -> None:
        self._check_parts()
        check_between("sources", self.sources, 0, 1)
        check_count("neighbours", self.neighbours, at_least=1)

    @property
    def parts(self) -> tuple[EvictionPolicy, ...]:
        return (self.host,)

    def score(self, context: ScoreContext) -> Tensor:
        (scores,) = self.part_scores(context)
        scores, valid = scores.float().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), context.valid
        usable = valid & scores.isfinite()
        lowest = scores.where(usable, 0.0).amin(-1, keepdim=True).clamp_max(0)
        return without_noise(scores - lowest, -lowest) * self._left(context, scores)

    def _left(self, context: ScoreContext, scores: Tensor) -> Tensor:
        """Factor on each score, `[batch, kv_heads, tokens]`, above 0 and at most 1."""
        valid, tokens = context.valid, context.positions.shape[-1]
        order, rank = best_first(scores, context.positions, self.host.needs.absolute_noise)
        unit = unit_keys(context.keys, valid)
        allowed = (valid.sum(-1, keepdim=True) * self.sources).floor()
        places = torch.arange(min(tokens, math.ceil(tokens * self.sources)), device=scores.device)
        logarithm = torch.zeros_like(scores)
        for place in places.split(piece_size(scores)):
            source = order[..., place]
            key = unit.gather(2, source[..., None].expand(-1, -1, -1, unit.shape[-1]))
            below = valid[:, :, None] & (rank[:, :, None] > place[:, None])
            similar = (key @ unit.mT).masked_fill(~below, -2.0)  # [B, H, sources, T]
            nearest = similar.topk(min(self.neighbours, tokens), dim=-1).values[..., -1:]
            lowered = below & (similar >= nearest) & (place < allowed)[..., None]
            left = torch.log1p(-similar.clamp(0.0, _MOST_SIMILAR))
            logarithm = logarithm + left.masked_fill(~lowered, 0.0).sum(2)
        return logarithm.clamp_min(math.log(_LEAST_LEFT)).exp()
