"""What a layer holds, in the order of the text."""

import torch
from torch import Tensor

from ..store.columns import gather_slots
from ..store.tensors import with_new
from ..table.table import BlockTable
from ..tensors.autocast import without_autocast
from .layer_state import LayerState


@without_autocast
def in_order(state: LayerState) -> tuple[Tensor, Tensor] | None:
    """A copy of the held keys and values, pending ones included, `[batch, kv_heads, tokens, dim]` in the order of the
    text, without rerotation. None before the first forward.

    Pads keep their columns until something is evicted; after that, the pads that are still held come first.

    Raises:
        ValueError: rows or heads hold different numbers of tokens.
    """
    state.exposed.check()
    table, pending = state.table, state.pending
    if table is None:
        return None
    held, order = table.held, table.positions.argsort(dim=-1, stable=True)
    if table.limits is not None:  # some slots belong to no row
        order = order[..., held - _equal_count(table, state.scorer.layer_idx) :]
    elif table.seen == held and (columns := state.padding.columns(0, held, table.rows, table.device)) is not None:
        places = columns[:, None].expand_as(order).long().argsort(dim=-1, stable=True)
        order = torch.empty_like(order).scatter(-1, places, order)
    keys, values = (gather_slots(states, order) for states in state.store.read(held))
    return (keys, values) if pending is None else with_new((keys, values), pending.keys, pending.values)


def _equal_count(table: BlockTable, layer_idx: int) -> int:
    counts = table.used.sum(-1)
    if int(counts.min()) < int(counts.max()):
        raise ValueError(
            f"Rows or KV heads of layer {layer_idx} hold different numbers of tokens, which no tensor [rows, kv_heads, "
            "tokens, head_dim] holds. Use allocator='uniform', or copy.deepcopy(cache) for a copy of the cache."
        )
    return int(counts.max())
