"""A store whose rows and KV heads hold different numbers of tokens, without padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.segments import InSegments
from ..parts import persistent
from ..store.columns import Columns
from ..store.room import Room
from ..store.store import Arrived, HeldSnapshot, Store
from .segments import Segments


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


class FlatColumns(Columns):
    """Columns `[total, ...]`: the slots of all rows and KV heads one after the other.

    Tensors of segments are of any size and do not come from a pool. What reads all slots at once gets a padded copy,
    made for the moment.

    Attributes:
        segments: where the slots lie.

    Args:
        segments: see above.
        tensors: of the columns.
    """

    def __init__(self, room: Room, segments: Segments, tensors: Sequence[Tensor]) -> None:
        super().__init__(room)
        self.segments, self.tensors = segments, tuple(tensors)

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Columns.shape`; slots are those of a padded copy."""
        return self.segments.rows, self.segments.heads, self.segments.width

    def first(self, held: int | None = None) -> Sequence[Tensor]:
        """See `Columns.first`."""
        width = self.segments.width if held is None else held
        return [self.segments.padded(column, width) for column in self.tensors]

    def at(self, slots: Tensor) -> list[Tensor]:
        """See `Columns.at`."""
        places = self.segments.places(slots)
        return [column[places] for column in self.tensors]

    def overwrite(self, slots: Tensor, new: Sequence[Tensor], where: Tensor | None = None) -> None:
        """See `Columns.overwrite`; of a single slot each."""
        places = self.segments.places_inside(slots)
        for column, states in zip(self.tensors, new, strict=True):
            written = states.reshape(-1, states.shape[-1])
            if where is not None:
                comes = where.expand(-1, self.segments.heads, -1).reshape(-1, 1)
                written = torch.where(comes, written, column.index_select(0, places))
            column.index_copy_(0, places, written)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Columns.map_rows`."""
        self.segments, places = self.segments.rows_of(change)
        self.tensors = tuple(_chosen(self.tensors, places))


def _chosen(columns: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """What stands at `places` in these, in tensors that may be written to in and out of `torch.inference_mode`."""
    with torch.inference_mode(False):
        made = [column.new_empty(len(places), *column.shape[1:]) for column in columns]
    for column, into in zip(columns, made, strict=True):
        torch.index_select(column, 0, places, out=into)
    return made


class RaggedStore(Store):
    """Keys and values of all rows and KV heads one after the other, each with as many slots as it may use.

    So a layer takes what the tokens that it may hold take, whatever the longest head holds. Until numbers differ it is
    an ordinary store. A decoded token reads the segments where they lie, see `attention.segments`.
    """

    @property
    def segments(self) -> Segments | None:
        """Where the slots lie; None as long as all hold equally many."""
        return self.columns.segments if isinstance(self.columns, FlatColumns) else None

    @property
    def copies(self) -> bool:
        """See `Store.copies`."""
        return self.segments is not None

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """See `Store.slots_to_begin_with`. A prompt is never appended, so a block is enough."""
        return most if self.room.pool is not None else min(block_size, most)

    def keep(self, keys: Tensor, values: Tensor, kept: Tensor, held: int, arrived: Arrived, anew: bool) -> None:
        """See `Store.keep`."""
        limits = arrived.limits
        if limits is None:
            raise ValueError("A ragged store is for layers whose rows or heads have limits of their own.")
        rows, heads = keys.shape[:2]
        segments = Segments(limits.expand(rows, heads).tolist(), keys.device, kept.shape[-1])
        places = segments.taken_from(kept, keys.shape[2])
        self._hold_segments(segments, _chosen([keys.flatten(0, 2), values.flatten(0, 2)], places))

    def _hold_segments(self, segments: Segments, states: Sequence[Tensor]) -> None:
        self.columns.use()  # gives back what there was
        self.columns = FlatColumns(self.room, segments, states)

    def give_values(self, values: Tensor, changed: Tensor) -> None:
        """See `Store.give_values`."""
        if self.segments is None:
            super().give_values(values, changed)
            return
        places = self.segments.places(torch.arange(values.shape[2], device=values.device))
        self.tensors[1][places[changed]] = values[changed]

    def give_up(self) -> None:
        """See `Store.give_up`."""
        super().give_up()
        self.columns = Columns(self.room)

    def noted(self, keys: Tensor) -> Tensor | None:
        """See `Store.noted`; not on an accelerator, where a loop over rows and heads costs more than a padded copy."""
        if self.segments is None or keys.device.type != "cpu":
            return None
        noted, (held_keys, held_values) = keys[:, :, :0], self.tensors
        noted.in_segments = InSegments(held_keys, held_values, self.segments.flat_lengths)  # type: ignore[attr-defined]
        return noted

    def clear(self) -> None:
        """See `Store.clear`. Segments serve no other prompt."""
        if self.segments is None:
            super().clear()
        else:
            self.give_up()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self, held: int) -> HeldSnapshot:
        """See `Store.snapshot`."""
        if self.segments is None:
            return super().snapshot(held)
        keys, values = self.tensors
        return RaggedSnapshot(held, keys, values, torch.tensor(self.segments.lengths))

    def restore(self, saved: HeldSnapshot, device: torch.device) -> None:
        """See `Store.restore`."""
        if not isinstance(saved, RaggedSnapshot):
            super().restore(saved, device)
            return
        self.dtype, self.device = saved.dtype, device
        segments = Segments(saved.lengths.tolist(), device, saved.slots)
        self._hold_segments(segments, [persistent(states.to(device)) for states in (saved.keys, saved.values)])
