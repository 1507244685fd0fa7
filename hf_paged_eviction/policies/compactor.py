"""Compactor, arXiv 2507.08143: the half that needs no attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import EvictionPolicy, ScoreContext
from .checks import check_positive
from .registry import register_policy


@register_policy("compactor")
@dataclass(frozen=True)
class Compactor(EvictionPolicy):
    r"""The leverage of a key: how much of its direction no other key of the head covers, `k (K'K + r)^-1 k'`.

    .. math:: s_t = k_t (K^\top K + r I)^{-1} k_t^\top

    Each KV head on its own, over the tokens held. `r` is `ridge` times the mean eigenvalue of `K'K`; it keeps the score
    smooth where there are fewer tokens than channels. The paper approximates leverage by a sketch, takes keys before
    rotary embedding, and adds attention without a causal mask; here leverage is exact, of keys as cached, and alone
    (`hybrid(compactor, attention_mean)` adds attention). Leverage is the same for all linear codes of the keys, so it
    also makes sense of the latents of MLA.

    Args:
        ridge: above 0.

    Raises:
        ValueError: `ridge` is not above 0.
    """

    ridge: float = 0.01

    paper: ClassVar[str | None] = "2507.08143"

    def __post_init__(self) -> None:
        check_positive("ridge", self.ridge)

    def score(self, context: ScoreContext) -> Tensor:
        keys = context.keys.float().masked_fill(~context.valid[..., None], 0.0)
        gram = keys.mT @ keys  # [B, H, D, D]
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        unit = torch.eye(gram.shape[-1], device=gram.device)
        # In units of the mean eigenvalue: the scale of the keys does not matter. All keys zero: all scores zero.
        scaled = gram / mean.where(mean > 0, 1.0) + self.ridge * unit
        root = torch.linalg.cholesky_ex(scaled).L
        halves = torch.linalg.solve_triangular(root, keys.mT, upper=False)  # [B, H, D, T]
        leverage: Tensor = halves.square().sum(2) / mean.where(mean > 0, 1.0)[..., 0]
        return leverage
