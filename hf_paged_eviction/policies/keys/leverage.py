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
    r"""Keeps the keys whose directions the other keys of the head cover least (statistical leverage).

    .. math:: s_t = k_t (K^\top K + r I)^{-1} k_t^\top

    `k` is the key before rotary embedding, because rotation mixes the position into the direction. `K` holds the keys
    of all held tokens of the KV head, one per row. `r` is `ridge` times the mean eigenvalue of `K'K`; it keeps the
    score smooth where a head holds fewer tokens than it has channels.

    This is the half of Compactor (arXiv 2507.08143) that needs no queries. A linear map of the keys does not change
    leverage, so the policy also works on the latents of MLA, which are not rotated.

    Args:
        ridge: regularisation, above 0.

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
    """The leverage `x (X'X + r I)^-1 x'` of each row `x` of `X`, computed exactly.

    Args:
        rows: `[..., tokens, dim]`, float32 or float64. Rows of zeros do not change the others and get the score 0.
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
    scores: Tensor = halves.square().sum(-2) / mean.where(mean > 0, 1.0)[..., 0]
    return scores
