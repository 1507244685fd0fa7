"""What recall keeps of one layer, as it stands in a file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parts import Snapshot
from ...store.store import HeldSnapshot
from ...table.table import TableSnapshot
from ..replacement import Resident

#: No text is longer.
_LONGEST = 2**40


@dataclass(frozen=True)
class RecallSnapshot(Snapshot):
    """The blocks in host memory, what is known of them, and of those in the slots.

    Attributes:
        states: `[B, H, N, P, width]`, see `HostBlocks`.
        high, low: `[B, H, N, D]`, see `Summaries`; without blocks where another layer chooses for this one.
        stored, due: `[B]` int64, see `Rows`.
        resident: None where nothing was asked for so far.
        looked: `[B, S, n]` bool, which blocks of the prompt may come back; None = all.
        resting: steps that are known to need no choice.
        faults: blocks that came back.
    """

    states: Tensor
    high: Tensor
    low: Tensor
    stored: Tensor
    due: Tensor
    resident: Resident | None
    looked: Tensor | None
    resting: int
    faults: int

    def check(self, table: TableSnapshot, store: HeldSnapshot, size: int, vectors: int, every: int) -> None:
        """Refuse what does not belong to a layer with this table and store, or would point outside.

        Args:
            size: of a block.
            vectors: of a summary; 0 = another layer chooses.
            every: tokens between two choices.

        Raises:
            ValueError: with the part.
        """
        state, (rows, heads, _, _) = table.state, store.shape
        width, value_width = store.widths
        _, sets, capacity = state.tokens.positions.shape
        blocks, frames = self.states.shape[2] if self.states.ndim == 5 else -1, (rows, sets, capacity // size)
        kind, none = store.dtype, (rows, heads, 0, width)
        self._shape("states", (rows, heads, blocks, size, width + value_width), kind)
        self._shape("high", (rows, heads, blocks, width) if vectors else none, kind)
        self._shape("low", (rows, heads, blocks, width) if vectors > 1 else none, kind)
        self._shape("stored", (rows,), torch.int64)
        self._shape("due", (rows,), torch.int64)
        count = table.counters.seen - state.phase.pads
        away = count > capacity
        self._need(blocks == int(self.stored.max()), "its blocks are not counted")
        self._need((self.stored >= 0) & (self.stored <= count // size), "more blocks are in host memory than came")
        self._need((self.stored >= (count - 1) // size) | ~away, "blocks are missing in host memory")
        last = state.tokens.positions
        last = last if state.phase.order is None else last.gather(-1, state.phase.order)
        ids = last[..., size - 1 :: size].div(size, rounding_mode="floor")
        newest = torch.arange(ids.shape[-1]) == state.choice.block[..., None]
        known = (ids < self.stored[:, None, None]) | newest | ~away[:, None, None]
        self._need(known, "blocks are in the slots that are not in host memory")
        self._need((self.due >= 0) & (self.due <= _LONGEST), "a choice is due at no moment")
        self._need(0 <= self.resting < every and 0 <= self.faults <= _LONGEST, "its steps are not counted")
        if self.looked is not None:
            self._shape("looked", (rows, sets, self.looked.shape[-1] if self.looked.ndim else 0), torch.bool)
        if self.resident is not None:
            of = self.resident
            for name, shape, dtype in (
                *((name, frames, torch.int64) for name in ("wanted_at", "asked")),
                *(("unlikely", frames, torch.bool), ("phase", frames[:2], torch.int64)),
            ):
                numbers = getattr(of, name)
                self._need(numbers.shape == shape and numbers.dtype == dtype, f"{name} is {list(numbers.shape)}")
                self._need((numbers >= 0) & (numbers <= _LONGEST), f"{name} is out of range")

    def _shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        found = getattr(self, name)
        self._need(
            found.shape == shape and found.dtype == dtype,
            f"{name} is {found.dtype} {list(found.shape)} where {dtype} {list(shape)} belongs",
        )

    @staticmethod
    def _need(condition: bool | Tensor, what: str) -> None:
        if not (condition if isinstance(condition, bool) else bool(condition.all())):
            raise ValueError(f"recall: {what}")
