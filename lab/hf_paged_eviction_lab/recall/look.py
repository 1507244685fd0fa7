"""The choice, once per prompt, of the blocks that may ever come back (MPCache's static stage)."""

from math import ceil

import torch
from torch import Tensor

from hf_paged_eviction.internals import Attention, AttentionCall, Site, Statistics, fold

_LAST = 0.2  # share of a prompt's queries whose attention counts


def look(call: AttentionCall, site: Site, keep: float) -> Tensor:
    """`[B, S, N]` bool: the blocks of a prompt that may come back.

    They are the share `keep` of each row's whole blocks, rounded up, that the last fifth of its queries paid the most
    attention to: the sum over tokens and queries, the mean over the query heads of a KV head.

    Args:
        call: the forward of the prompt; its tokens are not in the table yet.
    """
    size, queries = site.sizes.block_size, call.queries
    rows, heads, count = *queries.key.shape[:2], queries.query.shape[2]
    positions = call.table.new_positions(count, call.real)[:, 0]  # [B, q]
    length = positions.amax(-1) + 1
    first = length - (length * _LAST).ceil().long()
    mass = torch.zeros(rows, heads, count, device=positions.device)
    key_positions = positions[:, None].expand(-1, heads, -1)

    def add(statistics: Statistics, attention: Attention) -> Statistics:
        counts = attention.query_positions >= first[:, None]
        weights = attention.weights * counts[:, None, None, :, None]
        return {"mass": statistics["mass"] + weights.sum((2, 3))}

    window = ceil(_LAST * count) + 1
    mass = fold(add, {"mass": mass}, queries, key_positions, positions, window)["mass"]
    if site.heads == "shared":
        mass = mass.mean(1, keepdim=True)
    block = positions.clamp_min(0)[:, None].expand_as(mass) // size
    none = mass.new_zeros(*mass.shape[:2], count // size + 1)
    real = (positions >= 0)[:, None]
    per_block = none.scatter_add(-1, block, mass.masked_fill(~real, 0.0))
    whole = (length // size)[:, None, None]
    blocks = torch.arange(none.shape[-1], device=none.device)
    # Rounded, so that the last bit of a sum does not decide; of equal ones the newer stay.
    keys = (per_block * 2**12).round().masked_fill(blocks >= whole, -1).double() + blocks / none.shape[-1]
    place = keys.argsort(dim=-1, descending=True).argsort(dim=-1)
    return (place < (whole * keep).ceil()) | (blocks >= whole)  # later blocks may always come back
