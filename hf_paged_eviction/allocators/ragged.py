"""Columns whose rows and KV heads have different numbers of slots, without padding."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention.segments import InSegments
from ..parts import persistent
from ..store.columns import Columns
from .segments import Segments


class RaggedColumns(Columns):
    """Columns of which each row and KV head has as many slots as it may use, one after the other.

    So a layer takes what the tokens that it may hold take, whatever the longest head holds. Until numbers differ they
    are ordinary columns. Tensors of segments are of any size and do not come from a pool; what reads all slots at once
    gets a padded copy, made for the moment.

    Attributes:
        segments: where the slots lie; None as long as all have equally many.
    """

    pads = False
    segments: Segments | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Columns.shape`; of segments, slots are those of a padded copy."""
        if self.segments is None:
            return super().shape
        return self.segments.rows, self.segments.heads, self.segments.width

    @property
    def lengths(self) -> list[int] | None:
        """See `Columns.lengths`."""
        return None if self.segments is None else self.segments.flat_lengths

    def padded(self, column: int) -> Tensor:
        """See `Columns.padded`."""
        states = self.tensors[column]
        return states if self.segments is None else self.segments.padded(states, self.segments.width)

    def first(self, held: int | None = None) -> Sequence[Tensor]:
        """See `Columns.first`."""
        if self.segments is None:
            return super().first(held)
        width = self.segments.width if held is None else held
        return [self.segments.padded(column, width) for column in self.tensors]

    def at(self, slots: Tensor) -> list[Tensor]:
        """See `Columns.at`."""
        if self.segments is None:
            return super().at(slots)
        places = self.segments.places(slots)
        return [column[places] for column in self.tensors]

    def as_kept(self, held: int) -> tuple[Sequence[Tensor], Tensor | None]:
        """See `Columns.as_kept`."""
        if self.segments is None:
            return super().as_kept(held)
        return self.tensors, torch.tensor(self.segments.lengths)

    def noted(self, keys: Tensor, empty: int = 0) -> Tensor | None:
        """See `Columns.noted`; not on an accelerator, where a loop over rows and heads costs more than a
        padded copy."""
        if self.segments is None or keys.device.type != "cpu":
            return None
        noted, (held_keys, held_values) = keys[:, :, :0], self.tensors
        held = InSegments(held_keys, held_values, self.segments.flat_lengths, empty)
        noted.in_segments = held  # type: ignore[attr-defined]
        return noted

    def overwrite(self, slots: Tensor, new: Sequence[Tensor], where: Tensor | None = None) -> None:
        """See `Columns.overwrite`."""
        if self.segments is None:
            super().overwrite(slots, new, where)
            return
        places = self.segments.places(slots).flatten()
        for column, states in zip(self.tensors, new, strict=True):
            written = states.flatten(0, 2)
            if where is not None:
                comes = where.expand(-1, self.segments.heads, -1).reshape(-1, 1)
                written = torch.where(comes, written, column.index_select(0, places))
            column.index_copy_(0, places, written)

    def take(self, sources: Sequence[Tensor], kept: Tensor, views: bool, limits: Tensor | None = None) -> None:
        """See `Columns.take`."""
        if limits is None:
            raise ValueError("Ragged columns are for layers whose rows or heads have limits of their own.")
        rows, heads, width = sources[0].shape[:3]
        segments = Segments(limits.expand(rows, heads).tolist(), kept.device, kept.shape[-1])
        places = segments.taken_from(kept, width)
        self._lay(segments, _chosen(sources, places, 2))

    def _lay(self, segments: Segments, columns: Sequence[Tensor]) -> None:
        super().use()
        self.segments, self.tensors = segments, tuple(columns)

    def use(self, *new: Tensor) -> None:
        """See `Columns.use`."""
        super().use(*new)
        self.segments = None

    def reorder(self, order: Tensor) -> None:
        """See `Columns.reorder`."""
        if self.segments is None:
            super().reorder(order)
        else:
            self.tensors = tuple(_chosen(self.tensors, self.segments.in_order(order)))

    def hold(self, saved: Sequence[Tensor], lengths: Tensor | None, slots: int) -> None:
        """See `Columns.hold`."""
        if lengths is None:
            super().hold(saved, lengths, slots)
        else:
            self._lay(Segments(lengths.tolist(), saved[0].device, slots), [persistent(states) for states in saved])

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Columns.map_rows`."""
        if self.segments is None:
            super().map_rows(change)
        else:
            self.segments, places = self.segments.rows_of(change)
            self.tensors = tuple(_chosen(self.tensors, places))


def _chosen(columns: Sequence[Tensor], places: Tensor, last: int = 0) -> list[Tensor]:
    """What stands at `places` in these, whose dimensions up to `last` count as one. It may be written to in and out of
    `torch.inference_mode`."""
    chosen = []
    for column in columns:
        flat = column.flatten(0, last)
        with torch.inference_mode(False):
            made = flat.new_empty(len(places), *flat.shape[1:])
        chosen.append(torch.index_select(flat, 0, places, out=made))
    return chosen
