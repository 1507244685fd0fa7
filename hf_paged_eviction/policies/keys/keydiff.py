"""KeyDiff, arXiv 2504.15364."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy

#: Tokens scored at a time.
_PIECE = 4096


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    r"""Keeps the most distinctive keys of each KV head: minus the cosine similarity to the mean direction of all keys.

    .. math:: s_t = -\cos\Bigl(k_t, \sum_u \frac{k_u}{\lVert k_u \rVert}\Bigr)

    `k` are the keys after rotary embedding, and `u` runs over all held tokens of the KV head. From arXiv 2504.15364.
    """

    paper: ClassVar[str | None] = "2504.15364"
    needs = Needs(absolute_noise=True, reads=("keys",))

    def score(self, context: ScoreContext) -> Tensor:
        inverse = l2_norm(context.keys).clamp_min(1e-12).reciprocal() * context.valid
        # In pieces, so that there is no float32 copy of a long prompt's keys.
        pieces = list(zip(context.keys.split(_PIECE, 2), inverse[:, :, None].split(_PIECE, 3), strict=True))
        # The direction of the sum is that of the mean, so the count of valid tokens is not needed.
        anchor = normalize(sum(weight @ keys.float() for keys, weight in pieces), dim=-1)
        return -torch.cat([anchor @ keys.float().mT * weight for keys, weight in pieces], dim=-1)[:, :, 0]
