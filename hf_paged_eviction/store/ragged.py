"""Columns whose rows and KV heads have different numbers of slots, without padding."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..attention.in_place import carry
from ..attention.segments import InSegments
from ..saved import SavedState, StateDict
from .columns import Columns, States, no_mask, padded_shape
from .segments import Segments, read_at


class RaggedColumns(Columns):
    """Columns in which each row and KV head has exactly the slots that it may use, one set after the other.

    So the memory of a layer depends on the total number of its tokens, not on its longest head. As long as all sets
    have the same number of slots, these are ordinary columns. Methods that read all slots return a temporary padded
    copy.

    Attributes:
        segments: the places of the slots; None as long as all sets have the same number.
    """

    pads = False
    segments: Segments | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Columns.shape`; for segments, the number of slots is that of a padded copy."""
        if self.segments is None:
            return padded_shape(self.tensors)  # not that of `super()`, which a compiler cannot read
        return self.segments.rows, self.segments.heads, self.segments.width

    @property
    def lengths(self) -> list[int] | None:
        """See `Columns.lengths`."""
        return None if self.segments is None else self.segments.flat_lengths

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """See `Columns.bounds`."""
        return None if self.segments is None else self.segments.bounds

    def padded(self, name: str) -> Tensor:
        """See `Columns.padded`."""
        states = self.tensors[name]
        return states if self.segments is None else read_at(states, self.segments.first_places(self.segments.width))

    def first(self, held: int | None = None) -> States:
        """See `Columns.first`."""
        if self.segments is None:
            return super().first(held)
        width = self.segments.width if held is None else held
        places = self.segments.first_places(width)
        return {name: read_at(column, places) for name, column in self.tensors.items()}

    def at(self, slots: Tensor) -> States:
        """See `Columns.at`."""
        if self.segments is None:
            return super().at(slots)
        places = self.segments.places(slots)
        return {name: read_at(column, places) for name, column in self.tensors.items()}

    def carrier(
        self, keys: Tensor, held: int | None = None, visible: Callable[[], Tensor | None] = no_mask
    ) -> Tensor | None:
        """See `Columns.carrier`; not on an accelerator, where a loop over rows and heads costs more than a
        padded copy."""
        if self.segments is None or keys.device.type != "cpu":
            return None
        return carry(keys, InSegments(self["keys"], self["values"], self.segments.flat_lengths, visible()).read)

    def index(self, slots: Tensor, names: Iterable[str]) -> States:
        """See `Columns.index`."""
        segments = self.segments
        return super().index(slots, names) if segments is None else dict.fromkeys(names, segments.places(slots))

    def put(self, name: str, places: Tensor, states: Tensor, where: Tensor | None = None) -> None:
        """See `Columns.put`."""
        if self.segments is None:
            super().put(name, places, states, where)
            return
        column, written, places = self.tensors[name], states.flatten(0, 2), places.flatten()
        if where is not None:
            comes = where.expand(-1, self.segments.heads, -1).reshape(-1, *[1] * (written.ndim - 1))
            written = torch.where(comes, written, column.index_select(0, places))
        column.index_copy_(0, places, written)

    def _write_compiled(self, slot: Tensor, new: States) -> None:
        if self.segments is None:
            super()._write_compiled(slot, new)
            return
        places = self.segments.places(slot[..., None]).flatten()
        for name, states in new.items():
            self.tensors[name].index_put_((places,), states.flatten(0, 2))

    def take(self, sources: States, kept_indices: Tensor, views: bool, limits: Tensor | None = None) -> None:
        """See `Columns.take`."""
        if limits is None:
            raise ValueError("Ragged columns are for layers whose rows or heads have limits of their own.")
        rows, heads, width = next(iter(sources.values())).shape[:3]
        segments = Segments(limits.expand(rows, heads).tolist(), kept_indices.device, kept_indices.shape[-1])
        places = segments.taken_from(kept_indices, width)
        self._use_segments(segments, _chosen(sources, places, 2))

    def _use_segments(self, segments: Segments, columns: States) -> None:
        super().use({})
        self.segments = segments
        self._lay({name: self.room.own(column) for name, column in columns.items()})

    def use(self, new: States) -> None:
        """See `Columns.use`."""
        super().use(new)
        self.segments = None

    def reorder(self, order: Tensor) -> None:
        """See `Columns.reorder`."""
        if self.segments is None:
            super().reorder(order)
        else:
            self._lay(_chosen(self.tensors, self.segments.in_order(order)))

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Columns.map_rows`."""
        if self.segments is None:
            super().map_rows(change)
        else:
            self.segments, places = self.segments.rows_of(change)
            self._lay(_chosen(self.tensors, places))

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """See `Columns.state_dict`."""
        if self.segments is None:
            return super().state_dict(held)
        return {**self.tensors, "lengths": torch.tensor(self.segments.lengths, device="cpu")}

    def load_state(self, saved: SavedState, held: int) -> None:
        """See `Columns.load_state`."""
        if not saved.has("lengths"):
            super().load_state(saved, held)
            return
        rows, sets, _ = self.shape
        lengths = saved.checked("lengths", (rows, sets), torch.int64, 1, held)
        segments = Segments(lengths.tolist(), saved.device, held)
        columns = {
            name: saved.tensor(name, (segments.total, *column.shape[3:]), column.dtype)
            for name, column in self.tensors.items()
        }
        self._use_segments(segments, columns)


def _chosen(columns: States, places: Tensor, last: int = 0) -> dict[str, Tensor]:
    """What stands at `places` in these, whose dimensions up to `last` count as one. It may be written to in and out of
    `torch.inference_mode`."""
    chosen = {}
    for name, column in columns.items():
        flat = column.flatten(0, last)
        with torch.inference_mode(False):
            chosen_flat = flat.new_empty(len(places), *flat.shape[1:])
        chosen[name] = torch.index_select(flat, 0, places, out=chosen_flat)
    return chosen
