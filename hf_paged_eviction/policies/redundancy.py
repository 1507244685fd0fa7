"""The redundancy of keys."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..tensors.pieces import per_piece


def unit_keys(keys: Tensor, valid: Tensor) -> Tensor:
    """Keys of length one in float32; zero for pads. `[batch, kv_heads, tokens, dim]`."""
    return normalize(keys.float().masked_fill(~valid[..., None], 0.0), dim=-1)


def piece_size(tokens: Tensor) -> int:
    """Number of rows of a token x token matrix that fit into a piece, for `[batch, kv_heads, tokens]`."""
    return per_piece(tokens.device, tokens.numel())


def redundancy(keys: Tensor, positions: Tensor, threshold: float) -> Tensor:
    """Mean cosine similarity of each key to the other keys, each of which ignores its latest near duplicate.

    A near duplicate has a similarity above `threshold`. Because every token ignores the latest of its duplicates, the
    latest copy is the least redundant.

    Args:
        keys: `[batch, kv_heads, tokens, dim]`.
        positions: `[batch, kv_heads, tokens]`, -1 for pads, which are ignored.

    Returns:
        `[batch, kv_heads, tokens]` float32.
    """
    valid = positions >= 0
    unit = unit_keys(keys, valid)
    tokens = torch.arange(positions.shape[-1], device=positions.device)
    total = torch.zeros(positions.shape, device=positions.device)
    for rows in tokens.split(piece_size(positions)):
        total = total + _piece(unit, positions, rows, tokens, threshold)
    return total / valid.sum(-1, keepdim=True).clamp_min(1)


def _piece(unit: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor, threshold: float) -> Tensor:
    similar = (unit[:, :, rows] @ unit.mT).masked_fill(rows[:, None] == tokens, 0.0)
    near = similar > threshold
    latest = positions.int()[:, :, None].masked_fill(~near, -1).argmax(-1, keepdim=True)
    spared = near & (tokens == latest)
    return similar.masked_fill(spared, 0.0).sum(2)
