"""Random eviction: the baseline every score has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy

_MASK_32 = 0xFFFFFFFF


def _mix(bits: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (xor-shift and multiply; odd 31-bit factors keep it a bijection)."""
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & _MASK_32
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & _MASK_32
    return bits ^ (bits >> 16)


def drawn(seed: int, context: ScoreContext, moment: Tensor | None = None) -> Tensor:
    """`[batch, kv_heads, tokens]` float32 in [0, 1), a hash of seed, layer, head and position.

    Args:
        moment: `[batch]` int64, hashed too: other numbers at other moments.
    """
    positions = context.positions
    heads = context.first_head + torch.arange(positions.shape[1], device=positions.device)[:, None]
    stream = _mix(_mix(heads + (seed & _MASK_32)) + context.layer_idx)
    if moment is not None:
        stream = _mix((stream + moment[:, None, None]) & _MASK_32)
    bits = _mix((stream + positions) & _MASK_32)
    return (bits >> 8).float() / 2**24


def check_seed(seed: object) -> None:
    """Check that a seed is a whole number.

    Raises:
        ValueError: it is not.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}.")


@register_policy("random")
@dataclass(frozen=True)
class Random(EvictionPolicy):
    r"""Evicts at random: the baseline that every score has to beat.

    .. math:: s_t = 2^{-24} \operatorname{hash}(\text{seed}, \text{layer}, \text{head}, p_t)

    The score is uniform in [0, 1). It is a hash of seed, layer, KV head and position `p`, so it is the same on every
    device, in every batch and at every call.

    Args:
        seed: any whole number.

    Raises:
        ValueError: `seed` is not a whole number.
    """

    seed: int = 0

    needs = Needs(token_local=True)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def score(self, context: ScoreContext) -> Tensor:
        return drawn(self.seed, context)
