"""A store whose rows and KV heads hold different numbers of tokens, without padding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .segments import InSegments, Segments
from .store import Arrived, HeldSnapshot, Store
from .tensors import make_storage


@dataclass(frozen=True)
class RaggedSnapshot(HeldSnapshot):
    """What a ragged store holds.

    Attributes:
        keys, values: `[total, dim]`.
        lengths: `[batch, kv_heads]` int64, slots of each.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @property
    def shape(self) -> torch.Size:
        """See `HeldSnapshot`."""
        return torch.Size([*self.lengths.shape, self.slots, self.keys.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """See `HeldSnapshot`."""
        return self.keys.dtype


class RaggedStore(Store):
    """Keys and values of all rows and KV heads one after the other, each with as many slots as it may use.

    So a layer takes what the tokens that it may hold take, whatever the longest head holds. Until numbers differ it is
    an ordinary store; from then on its tensors are `[total, dim]`. What reads all slots at once gets a padded copy,
    made for the moment; a decoded token reads the segments where they lie, see `queries.segments`. Tensors of
    segments are of any size and do not come from a pool.

    Attributes:
        segments: where the slots lie; None as long as all hold equally many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segments: Segments | None = None

    @property
    def keys(self) -> Tensor | None:
        """See `Store.keys`."""
        return self._keys if self._keys is None else self.read()[0]

    @property
    def values(self) -> Tensor | None:
        """See `Store.values`."""
        return self._values if self._values is None else self.read()[1]

    @property
    def copies(self) -> bool:
        """See `Store.copies`."""
        return self.segments is not None

    @property
    def shape(self) -> tuple[int, int]:
        """See `Store.shape`."""
        return super().shape if self.segments is None else (self.segments.rows, self.segments.heads)

    @property
    def slots(self) -> int:
        """Of a padded copy."""
        return super().slots if self.segments is None else self.segments.width

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """See `Store.slots_to_begin_with`. A prompt is never appended, so a block is enough."""
        return most if self.pool is not None else min(block_size, most)

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """See `Store.start`."""
        if self.segments is not None:
            self.give_up()
        super().start(keys, values, least, most)

    def put(self, keys: Tensor | None, values: Tensor | None) -> None:
        """See `Store.put`."""
        super().put(keys, values)
        self.segments = None

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def read(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """See `Store.read`: a copy where numbers differ."""
        segments = self.segments
        if segments is None:
            return super().read(held)
        width = segments.width if held is None else held
        keys, values = self._both
        return segments.padded(keys, width), segments.padded(values, width)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `Store.at`."""
        if self.segments is None:
            return super().at(slots)
        places, (keys, values) = self.segments.places(slots), self._both
        return keys[places], values[places]

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """See `Store.overwrite`."""
        if self.segments is None:
            super().overwrite(slot, keys, values, real)
            return
        places = self.segments.places_inside(slot)
        for column, new in zip(self._both, (keys, values), strict=True):
            written = new.reshape(-1, new.shape[-1])
            if real is not None:
                stays = ~real.expand(-1, self.segments.heads).reshape(-1, 1)
                written = torch.where(stays, column.index_select(0, places), written)
            column.index_copy_(0, places, written)

    def keep(self, keys: Tensor, values: Tensor, kept: Tensor, held: int, arrived: Arrived, anew: bool) -> None:
        """See `Store.keep`."""
        limits = arrived.limits
        if limits is None:
            raise ValueError("A ragged store is for layers whose rows or heads have limits of their own.")
        rows, heads = keys.shape[:2]
        segments = Segments(limits.expand(rows, heads).tolist(), keys.device, kept.shape[-1])
        indices = segments.taken_from(kept, keys.shape[2])
        self._put_segments(segments, *[self._select(states.flatten(0, 2), indices) for states in (keys, values)])

    def _select(self, column: Tensor, indices: Tensor) -> Tensor:
        made = make_storage((len(indices), column.shape[-1]), column.dtype, column.device)
        return torch.index_select(column, 0, indices, out=made)

    def _put_segments(self, segments: Segments, keys: Tensor, values: Tensor) -> None:
        self.put(keys, values)
        self.segments = segments

    def noted(self, keys: Tensor) -> Tensor | None:
        """See `Store.noted`; not on an accelerator, where a loop over rows and heads costs more than a padded copy."""
        if self.segments is None or keys.device.type != "cpu":
            return None
        noted = keys[:, :, :0]
        noted.in_segments = InSegments(*self._both, self.segments.flat_lengths)  # type: ignore[attr-defined]
        return noted

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Store.map_rows`."""
        if self.segments is None:
            super().map_rows(change)
            return
        segments, places = self.segments.rows_of(change)
        self._put_segments(segments, *(self._select(column, places) for column in self._both))

    def clear(self) -> None:
        """See `Store.clear`. Segments serve no other prompt."""
        super().clear()
        if self.segments is not None:
            self.give_up()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self, held: int) -> HeldSnapshot:
        """See `Store.snapshot`."""
        if self.segments is None:
            return super().snapshot(held)
        return RaggedSnapshot(held, *self._both, torch.tensor(self.segments.lengths))

    def restore(self, saved: HeldSnapshot, device: torch.device) -> None:
        """See `Store.restore`."""
        if not isinstance(saved, RaggedSnapshot):
            super().restore(saved, device)
            return
        segments = Segments(saved.lengths.tolist(), device, saved.slots)
        states = [states.to(device) for states in (saved.keys, saved.values)]
        self.dtype, self.device = states[0].dtype, device
        everything = torch.arange(segments.total, device=device)
        self._put_segments(segments, *(self._select(column, everything) for column in states))
