"""The tokens of a store in few bits that are not rounded, and the statistics of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors.parts import map_tensors, tensors_of
from .columns import gather_slots, slot_index

#: Slot of an empty place.
EMPTY = -1

#: Keys and values `[B, H, n, dim]` of the slots `[B, H, n]`.
Source = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RowStatistics:
    """Mean and size of each channel in a row, measured on its first tokens, `[batch, kv_heads, 1, dim]` each.

    Attributes:
        mean: see `Codec.mean`.
        sizes: see `Codec.sizes`.
    """

    mean: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class Newest:
    """The newest tokens of a layer.

    Attributes:
        slots, positions: `[B, H, P]` int64.
        keys, values: `[B, H, P, dim]`, not rounded.
        waits: `[B, H, P]` bool, True if the token has no codes yet.
    """

    slots: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    waits: Tensor


@dataclass
class Exact:
    """Tokens in the model's dtype, in places by position: one of the first `N` tokens of a row, token `x`, has place `P
    + x`; any other token has place `x % P`, until token `x + P` takes it.

    Only held tokens have places. When a token is overwritten, its place becomes empty in the same call.

    A row gets its statistics from its first tokens: when several come at once, or when single tokens have filled its
    first block. Until then all its tokens are among the newest and wait for their codes, so the statistics depend on
    the tokens of the row alone.

    Shapes: `B` rows, `H` KV heads, `P` newest tokens, `N` first tokens, `W = P + N` places.

    Attributes:
        newest: `P`, number of newest tokens.
        keys, values: `[B, H, W, dim]`.
        slots: `[B, H, W]` int64, slot of the token in each place; `EMPTY` = the place has no token.
        count: `[B]` int64, number of real tokens of each row.
        coded: `[B]` int64, number of these tokens that have codes; -1 = the row has no statistics yet.
        means: `[B, H, 1, dim of keys + dim of values]`, mean that is subtracted before encoding, see `Codec.mean`; 0 =
            nothing, or not known yet.
        sizes: like `means`, divisors of the channels, see `Codec.sizes`; 1 = no division.
        since: `[B]` int64, no token before this one is among the newest. (After a rollback, some of them would be.)
    """

    newest: int
    keys: Tensor
    values: Tensor
    slots: Tensor
    count: Tensor
    coded: Tensor
    means: Tensor
    sizes: Tensor
    since: Tensor

    @classmethod
    def kind(cls, keys: Tensor, values: Tensor, newest: int, first: int) -> "Exact":
        """For rows of states like these, `[B, H, n, dim]`, on the device "meta"."""
        (rows, heads, _, width), dim, dtype = keys.shape, values.shape[-1], keys.dtype
        places, channels = (rows, heads, newest + first), (rows, heads, 1, width + dim)
        shapes = (*places, width), (*places, dim), places, (rows,), (rows,), channels, channels, (rows,)
        dtypes = dtype, dtype, torch.int64, torch.int64, torch.int64, dtype, dtype, torch.int64
        parts = zip(shapes, dtypes, strict=True)
        return cls(newest, *(torch.empty(shape, dtype=kind, device="meta") for shape, kind in parts))

    def tensors(self) -> list[Tensor]:
        """All tensors, with rows in dimension 0."""
        return tensors_of(self)

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for tokens whose places can be worked out together."""
        return self.keys.shape, self.values.shape, self.keys.dtype, self.keys.device, self.newest

    def change(self, change: Callable[[Tensor], Tensor]) -> "Exact":
        """Apply a function to every tensor."""
        return map_tensors(change, self)

    def clear(self) -> None:
        """Forget all tokens."""
        for part in vars(self).values():
            if isinstance(part, Tensor):
                part.zero_()
        self.slots.fill_(EMPTY)
        self.coded.fill_(-1)
        self.sizes.fill_(1.0)

    # ---- statistics -----------------------------------------------------------------------------------------------

    def meet(
        self, codecs: Sequence[Any], states: tuple[Tensor, Tensor], real: Tensor | None, waiting: bool = False
    ) -> None:
        """Compute the statistics of rows that have none, before several keys and values `[B, H, n, dim]` come; a row
        gets none if a single one of them is its own, and does not fill its first block. `find` must follow.

        Args:
            codecs: codecs of keys and of values.
            real: `[B, n]` bool, False for pads; None = all are real.
            waiting: whether such rows may have tokens already, which then count.
        """
        arrived = torch.ones_like(states[0][:, 0, :, 0], dtype=torch.bool) if real is None else real
        several = arrived.sum(-1)
        new = (self.coded < 0) & ((several > 1) | (self.count + several >= self.newest))
        positions, shown = (arrived.cumsum(-1) - 1).clamp_min(0), None if real is None else real[:, None]
        if waiting:
            own, keys, values, there = self._newest_own()
            positions = torch.cat([own.clamp_min(0), self.count[:, None] + positions], dim=-1)
            shown = torch.cat([there, arrived[:, None].expand(-1, there.shape[1], -1)], dim=-1)
            states = torch.cat([keys, states[0]], dim=2), torch.cat([values, states[1]], dim=2)
        self._learn(codecs, new, states, positions, shown)

    def meet_blocks(self, codecs: Sequence[Any]) -> None:
        """Compute the statistics of rows that have none, and whose first block is full."""
        own, keys, values, there = self._newest_own()
        new = (self.coded < 0) & (self.count >= self.newest)
        self._learn(codecs, new, (keys, values), own.clamp_min(0), there)

    def _learn(
        self,
        codecs: Sequence[Any],
        new: Tensor,
        states: tuple[Tensor, Tensor],
        positions: Tensor,
        shown: Tensor | None,
    ) -> None:
        """Set the statistics of the rows `new` `[B]` bool; for the rest see `Codec.mean`."""
        for codec, came, held in zip(codecs, states, self.row_statistics(), strict=True):
            if codec.centred:
                statistics = codec.row_statistics(came, positions, shown)
                for part, by_these in ((held.mean, statistics.mean), (held.sizes, statistics.sizes)):
                    part.copy_(torch.where(new[:, None, None, None], by_these, part))

    def _newest_own(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last positions `[B, P]`, negative where no token came; keys and values `[B, H, P, dim]`; and which of
        them are held, `[B, H, P]` bool. Those of other tokens may be anything."""
        own = self._last_positions()
        place = self._place_of(own)[:, None].expand(-1, self.slots.shape[1], -1)
        there = (self.slots.gather(-1, place) != EMPTY) & (own >= self.since[:, None])[:, None]
        return own, gather_slots(self.keys, place), gather_slots(self.values, place), there

    def first_blocks(self) -> list[int]:
        """How many tokens rows without statistics need to fill their first block. Reads a tensor."""
        missing: list[int] = (self.newest - self.count)[self.coded < 0].tolist()
        return missing

    def row_statistics(self) -> tuple[RowStatistics, RowStatistics]:
        """The statistics of keys and of values; views."""
        keys, values = slice(self.keys.shape[-1]), slice(self.keys.shape[-1], None)
        return RowStatistics(self.means[..., keys], self.sizes[..., keys]), RowStatistics(
            self.means[..., values], self.sizes[..., values]
        )

    # ---- one token ------------------------------------------------------------------------------------------------

    def put(self, slots: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Put a token of every row, `[B, H, 1, dim]`, into its place; its slot is `slots` `[B, 1 or H]`.

        The former token of the slot is removed. Rows where `real` `[B, 1]` is False do not change. Until `counted` is
        called, another token may replace it.
        """
        gone = self.slots == slots[..., None]
        self.slots.masked_fill_(gone if real is None else gone & real[..., None], EMPTY)
        place = self._place_of(self.count)[:, None, None, None]
        new = keys, values, slots[..., None].expand(-1, self.slots.shape[1], 1)
        for held, states in zip((self.keys, self.values, self.slots), new, strict=True):
            at = (place if states.ndim == 4 else place[..., 0]).expand_as(states)
            if real is not None:
                states = torch.where(real.view(-1, *[1] * (states.ndim - 1)), states, held.gather(2, at))
            held.scatter_(2, at, states)

    def upcoming(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What `put` will do with the next tokens of every row, all of them real and at most `newest`, for these slots
        `[B, 1 or H, n]`, all different: their places `[B, n]`, and `slots` after each of them, `[B, H, n, W]`."""
        steps, width = torch.arange(slots.shape[-1], device=slots.device), self.slots.shape[-1]
        places = self._place_of(self.count[:, None] + steps)
        taken = (places[..., None] == torch.arange(width, device=slots.device))[:, None]
        gone = (taken | (slots[..., None] == self.slots[:, :, None])).cumsum(2) > 0
        new = (taken * (slots[..., None] - EMPTY)).cumsum(2) + EMPTY  # each place is taken once
        return places, torch.where(gone, new, self.slots[:, :, None])

    def _place_of(self, positions: Tensor) -> Tensor:
        """Where tokens at these positions lie, as long as they do."""
        newest, first = self.newest, self.slots.shape[-1] - self.newest
        ring = positions % newest
        return torch.where(positions < first, positions + newest, ring) if first else ring

    def counted(self, real: Tensor | None) -> None:
        """Count the token of the last `put`, except in rows where `real` `[B, 1]` is False."""
        self.count.add_(1 if real is None else real[:, 0])

    def newest_tokens(self) -> "Newest":
        """The newest tokens, with or without codes. For an empty place the result repeats another token, or has slot 0
        without `waits`, so the slots may be written in any order."""
        place, any_held = self._shown(
            self._place_of(self._last_positions())[:, None].expand(-1, self.slots.shape[1], -1)
        )
        slots = self.slots.gather(-1, place).clamp_min(0)
        positions = self._positions()[:, None].expand_as(self.slots).gather(-1, place)
        waits = (positions >= self.coded[:, None, None]) & any_held
        return Newest(slots, positions, gather_slots(self.keys, place), gather_slots(self.values, place), waits)

    def _last_positions(self) -> Tensor:
        """`[B, P]` the last positions, in the order of their places; negative where no token came."""
        last = self.count[:, None] - 1
        return last - (last - torch.arange(self.newest, device=last.device)) % self.newest

    def _shown(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of these places `[B, H, n]` each, or another one where it is empty; and whether any has a token, `[B, H, 1]`
        bool."""
        taken = self.slots.gather(-1, places) != EMPTY
        another = places.gather(-1, taken.int().argmax(-1, keepdim=True))
        return torch.where(taken, places, another), taken.any(-1, keepdim=True)

    # ---- several tokens -------------------------------------------------------------------------------------------

    def _positions(self) -> Tensor:
        """`[B, W]` position of the token that belongs to each place; negative, or too large, where none has come."""
        places = torch.arange(self.slots.shape[-1], device=self.slots.device)
        last = self.count[:, None] - 1
        newest = last - (last - places) % self.newest
        return torch.where(places < self.newest, newest, places - self.newest)

    def find(self, positions: Tensor, count: Tensor, source: Source) -> None:
        """Find the tokens again after tokens came, went or moved, and all have codes, but those of rows without
        statistics.

        Args:
            positions: `[B, 1 or H, held]` positions of the held tokens, -1 for pads and dead slots.
            count: `[B]` number of real tokens of each row so far, held or not.
            source: returns the states in given slots.
        """
        met = (self.coded >= 0) | (count - self.count > 1) | (count >= self.newest)  # see `meet`
        self.count.copy_(count)
        self.coded.copy_(torch.where(met, count, -1))
        slots = self._slots_of(positions)
        keys, values = source(slots.clamp_min(0))  # may read these tokens
        self.slots.copy_(slots)
        self.keys.copy_(keys)
        self.values.copy_(values)

    def _slots_of(self, positions: Tensor) -> Tensor:
        """`[B, H, W]`."""
        newest, places = self.newest, self.slots.shape[-1]
        real, behind = positions >= 0, self.count[:, None, None] - newest
        first = real & (positions < places - newest)
        recent = real & ~first & (positions >= torch.maximum(behind, self.since[:, None, None]))
        slots = torch.full((*positions.shape[:2], places + 1), EMPTY, dtype=torch.int64, device=positions.device)
        held = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
        slots.scatter_(-1, torch.where(recent, positions % newest, places), held)
        slots.scatter_(-1, torch.where(first, newest + positions, places), held)
        return slots[..., :places].expand(-1, self.slots.shape[1], -1)

    def vacate(self, gone: Tensor) -> None:
        """Remove the tokens in these slots, `[B, 1 or H, held]` bool."""
        if gone.shape[-1]:  # after crop there may be none, and then there is nothing to look up
            left = gone.expand(-1, self.slots.shape[1], -1).gather(-1, self.slots.clamp_min(0))
            self.slots.masked_fill_(left, EMPTY)

    def reorder(self, order: Tensor) -> None:
        """Note that slot `s` holds the token of slot `order[s]` now, `[B, 1 or H, held]`."""
        if not order.shape[-1]:
            return
        slots = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        moved = slots.expand(-1, self.slots.shape[1], -1).gather(-1, self.slots.clamp_min(0))
        self.slots.copy_(torch.where(self.slots == EMPTY, EMPTY, moved))

    def taken_back(self, left: Tensor) -> None:
        """Note that `left` `[B]` tokens of each row remain, and all have codes, but those of rows without
        statistics."""
        self.means.masked_fill_((left == 0)[:, None, None, None], 0.0)  # these rows start again
        self.sizes.masked_fill_((left == 0)[:, None, None, None], 1.0)
        self.since.copy_(torch.maximum(self.since, self.count - self.newest).minimum(left))
        self.count.copy_(left)
        self.coded.copy_(torch.where(left == 0, -1, self.coded.minimum(left)))
        lowest = torch.where(
            torch.arange(self.slots.shape[-1], device=left.device) < self.newest, self.since[:, None], 0
        )
        positions = self._positions()
        stays = (positions >= lowest) & (positions < left[:, None])
        self.slots.copy_(torch.where(stays[:, None], self.slots, EMPTY))

    def encoded(self) -> None:
        """Note that all tokens have codes, but those of rows without statistics whose first block is not full."""
        met = (self.coded >= 0) | (self.count >= self.newest)
        self.coded.copy_(torch.where(met, self.count, -1))

    def oldest(self, real: Tensor | None) -> Newest:
        """The token of each row whose place the next token takes; it `waits` if it will be rounded then. `real` `[B,
        1]` bool, False if the next token is a pad."""
        leaving = self.count - self.newest
        leaves = (leaving >= self.since) & (leaving >= self.slots.shape[-1] - self.newest)
        leaves = leaves if real is None else leaves & real[:, 0]
        place = (self.count % self.newest)[:, None, None].expand(-1, self.slots.shape[1], -1)
        slots, positions = self.slots.gather(-1, place), leaving[:, None, None].clamp_min(0).expand_as(place)
        states = gather_slots(self.keys, place), gather_slots(self.values, place)
        return Newest(slots.clamp_min(0), positions, *states, leaves[:, None, None] & (slots != EMPTY))

    # ---- reading --------------------------------------------------------------------------------------------------

    def write_over(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Write these tokens over their slots in decoded keys and values, `[B, H, held, dim]`; None = not in these."""
        places = torch.arange(self.slots.shape[-1], device=self.slots.device)
        place, any_held = self._shown(places.expand_as(self.slots))
        slots = self.slots.gather(-1, place).clamp_min(0)
        for read, exact in ((keys, self.keys), (values, self.values)):
            if read is None:
                continue
            states = torch.where(any_held[..., None], gather_slots(exact, place), read[:, :, :1])
            read.scatter_(2, slot_index(slots, read), states)

    def instead(self, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Replace decoded states of the slots `[B, 1 or H, n]` by these tokens where they are exact."""
        match = slots[..., :, None] == self.slots[..., None, :]  # [B, H, n, W]
        is_exact, place = match.any(-1)[..., None], match.int().argmax(-1)
        return (
            torch.where(is_exact, gather_slots(self.keys, place), keys),
            torch.where(is_exact, gather_slots(self.values, place), values),
        )
