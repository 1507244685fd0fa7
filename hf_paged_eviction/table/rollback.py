"""Take back the newest tokens, even after some tokens were evicted."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from ..ranking import KEEP
from .table import BlockTable


def columns_to_remove(tokens_to_remove: int, seen: int) -> int:
    """Number of columns that `crop` takes back, of `seen` columns.

    Args:
        tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` of those seen (transformers 5.14).
    """
    return max(seen - tokens_to_remove, 0) if tokens_to_remove > 0 else min(-tokens_to_remove, seen)


def order_without(table: BlockTable, count: int, tokens: Tensor, pads: Tensor) -> Tensor | None:
    """The order of the slots that puts the last `count` columns last.

    Args:
        tokens: `[B]` number of real, visible tokens among these columns; hidden ones have no slots.
        pads: `[B]` number of columns without a position among the remaining ones.

    Returns:
        Slots `[B, S, held]`; None if the slots are in this order already.

    Raises:
        ValueError: some of these tokens have been evicted.
    """
    if table.counters.in_arrival_order:
        return None
    if table.limits is not None:
        raise ValueError(
            f"Cannot take back {count} tokens: the shares of this layer were decided with them. Call "
            "`cache.activate_past_recording()` before the forward that may be taken back."
        )
    positions = table.positions
    left = (table.seen - count - pads)[:, None, None]  # the first position that is taken back
    empty, newest = positions < 0, positions >= left
    gone = newest | (empty & (empty.cumsum(-1) <= (count - tokens)[:, None, None]))
    if bool((newest.sum(-1) != tokens[:, None]).any()) or bool((gone.sum(-1) != count).any()):
        raise ValueError(
            f"Cannot take back {count} tokens: some of them have been evicted. Call "
            "`cache.activate_past_recording()` before the forward that may be taken back, or use a larger budget."
        )
    return positions.masked_fill(gone, KEEP).argsort(stable=True, dim=-1)


def crop_all_or_none(layers: Sequence[Any], crops: Sequence[Callable[[int], None]], count: int, left: int) -> None:
    """Take back the last `count` tokens in all of these layers of transformers, or in none.

    Releases differ in when such a layer refuses. So each layer is cropped, and all are restored if one refuses. A layer
    that recorded nothing is not cropped by 0: some refuse this.

    Args:
        layers: layers that may replace their tensors and write to their lists when they crop.
        crops: the crop function of each layer, called with `-count`.
        left: number of tokens that stay.

    Raises:
        RuntimeError, ValueError: the error of the layer that refuses.
    """
    before = [_attributes(layer) for layer in layers]
    try:
        for layer, crop in zip(layers, crops, strict=True):
            if count or getattr(layer, "record_past", False):
                crop(-count)
                _check_window(layer, count)
                _check_convolution(layer, count, left)
    except Exception:
        for layer, attributes in zip(layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


def _attributes(layer: Any) -> dict[str, Any]:
    """What a layer is made of. Layers replace their tensors when they crop, but write to their lists."""
    return {name: copy(value) if isinstance(value, list | dict) else value for name, value in vars(layer).items()}


def _check_window(layer: Any, count: int) -> None:
    """A sliding window that recorded fewer tokens than were taken back has a hole at its start, and does not say so."""
    window, keys = getattr(layer, "sliding_window", None), getattr(layer, "keys", None)
    if window is not None and keys is not None and keys.shape[-2] < min(layer.get_seq_length(), window - 1):
        raise ValueError(
            f"Cannot take back {count} tokens: a sliding-window layer recorded fewer, and what came into its window "
            "in their place is gone. Take back no more than the last forward brought."
        )


def _check_convolution(layer: Any, count: int, left: int) -> None:
    """A short convolution that recorded fewer tokens than were taken back lacks the beginning of its state."""
    states, sizes = getattr(layer, "conv_states", None), getattr(layer, "conv_kernel_size", None)
    if not isinstance(states, dict) or not isinstance(sizes, dict):
        return  # releases that record nothing refuse to crop
    for number, state in states.items():
        if state is not None and state.shape[-1] < min(left, sizes[number]):
            raise ValueError(
                f"Cannot take back {count} tokens: a short convolution recorded fewer since the last `crop`, and what "
                "it held before them is gone. Take back no more than the forwards since then brought."
            )
