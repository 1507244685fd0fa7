"""Leverage of keys, after arXiv 2507.08143."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..checks import check_positive
from ..needs import Needs
from ..registry import register_policy


@register_policy("leverage")
@dataclass(frozen=True)
class Leverage(EvictionPolicy):
    r"""How much of a key's direction no other key of the head covers, `k (K'K + r)^-1 k'`.

    .. math:: s_t = k_t (K^\top K + r I)^{-1} k_t^\top

    Each KV head on its own, over the tokens held, of keys before rotary embedding: rotated, a key's direction says
    where it stands as much as what it says. `r` is `ridge` times the mean eigenvalue of `K'K`; it keeps the score
    smooth where there are fewer tokens than channels. Ours: the geometric half of `compactor`, without queries.
    Leverage is the same for all linear codes of the keys, so it also makes sense of the latents of MLA, which are not
    rotated.

    Args:
        ridge: above 0.

    Raises:
        ValueError: `ridge` is not above 0.
    """

    ridge: float = 0.01

    paper: ClassVar[str | None] = "2507.08143"
    needs = Needs(rotary=True)

    def __post_init__(self) -> None:
        check_positive("ridge", self.ridge)

    def score(self, context: ScoreContext) -> Tensor:
        return leverage(context.unrotated_keys.float().masked_fill(~context.valid[..., None], 0.0), self.ridge)


def leverage(rows: Tensor, ridge: float) -> Tensor:
    """`x (X'X + r I)^-1 x'` of each row `x`, exactly.

    Args:
        rows: `[..., tokens, dim]`, float32 or float64; rows of zeros neither matter nor score.
        ridge: `r` in units of the mean eigenvalue of `X'X`.

    Returns:
        `[..., tokens]`.
    """
    gram = rows.mT @ rows
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    unit = torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
    # In units of the mean eigenvalue: the scale of the rows does not matter. All rows zero: all scores zero.
    scaled = gram / mean.where(mean > 0, 1.0) + ridge * unit
    root = torch.linalg.cholesky_ex(scaled).L
    halves = torch.linalg.solve_triangular(root, rows.mT, upper=False)  # [..., dim, tokens]
    found: Tensor = halves.square().sum(-2) / mean.where(mean > 0, 1.0)[..., 0]
    return found
