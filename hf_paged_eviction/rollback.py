"""Whether the newest tokens can be taken back after some were evicted, and what remains where."""

from torch import Tensor, arange

from .blocks import BlockTable
from .ranking import KEEP


def order_without(table: BlockTable, count: int, pads: Tensor) -> Tensor | None:
    """The order of the slots in which the last `count` columns come last.

    Args:
        pads: `[B]` pads among the columns that remain.

    Returns:
        Slots `[B, S, held]`; None if they are in that order already.

    Raises:
        ValueError: some of these tokens have been evicted.
    """
    if table.in_arrival_order:
        return None
    if table.limits is not None:
        raise ValueError(
            f"Cannot take back {count} tokens: the shares of this layer were decided with them. Call "
            "`cache.activate_past_recording()` before the forward that may be taken back."
        )
    positions = table.positions
    slots = arange(table.held, device=table.device)
    left = (table.seen - count - pads)[:, None, None]  # real tokens that remain
    gone = (positions >= left) | ((positions < 0) & (slots < (table.pads - pads)[:, None, None]))
    if bool((gone.sum(-1) != count).any()):
        raise ValueError(
            f"Cannot take back {count} tokens: some of them have been evicted. Call "
            "`cache.activate_past_recording()` before the forward that may be taken back, or use a larger budget."
        )
    return positions.masked_fill(gone, KEEP).argsort(stable=True, dim=-1)
