"""The bookkeeping of all live requests in all paged layers: which token is in which slot, and which goes next.

It decides as the table and the cohort of a `PagedEvictionCache` do for one unpadded row: slots are filled in order;
from then on the block with the lowest score is overwritten; several tokens that do not fit make every layer choose
anew. How far a request is, is a number on the host (its seat). What differs between layers is a tensor with all
requests in it, so that a step costs the same few operations for one request and for a hundred.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..layer.paged import PagedLayer
from ..ranking import KEEP, best_tokens, rank_keys
from ..table.bounds import NOWHERE, bounds_of, inside
from ..table.budget import BlockBudget
from .pages import Pages
from .seats import Seat
from .start import Start


class Roster:
    """Positions, scores and victims.

    Shapes: `L` paged layers, `R` seats, `S` sets of tokens (1, or one for each KV head), `C` budget, `P` block size,
    `n` seats that are looked at.

    Attributes:
        positions: `[L, R, S, C]` int64, of the token in each slot that is in use.
        scores: `[L, R, S, C]` float32, as of the last choice.
        block: `[L, R, S]` int64, the block that new tokens overwrite: the newest one.
        bounds: `[R, n]` int64, what is protected of each request, see `table/bounds.py`.

    Args:
        sizes: in tokens.
        layers: by index in the model; they score.
        pages: their keys and values, in the same order.
        sets: `S`.
    """

    def __init__(self, sizes: BlockBudget, layers: Mapping[int, PagedLayer], pages: Pages, sets: int) -> None:
        self.sizes, self.pages = sizes, pages
        self.capacity, self.block_size = sizes.capacity, sizes.block_size
        self._layers = list(layers.values())
        self._needs = self._layers[0].needs
        self._together = (
            self._needs.token_local
            and not self._needs.by_layer
            and all(layer.rotary is self._layers[0].rotary for layer in self._layers)
        )
        device, count = pages.device, len(self._layers)
        self.positions = torch.zeros(count, 0, sets, self.capacity, dtype=torch.int64, device=device)
        self.scores = torch.zeros(count, 0, sets, self.capacity, device=device)
        self.block = torch.zeros(count, 0, sets, dtype=torch.int64, device=device)
        self.bounds = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self._blocks = torch.arange(self.capacity // self.block_size, device=device)
        self._places = torch.arange(self.block_size, device=device)
        self._all_slots = torch.arange(self.capacity, device=device)
        self._each_layer = torch.arange(count, device=device)[:, None, None]
        self._each_set = torch.arange(sets, device=device)

    def seat(self, number: int, seats: int) -> None:
        """A new request takes this seat; there are so many of them."""
        more = seats - self.block.shape[1]
        if more > 0:
            self.positions, self.scores, self.block = (
                torch.cat([tensor, tensor.new_zeros(tensor.shape[0], more, *tensor.shape[2:])], dim=1)
                for tensor in (self.positions, self.scores, self.block)
            )
            self.bounds = torch.cat([self.bounds, self.bounds.new_zeros(more, self.bounds.shape[1])])
        self.block[:, number] = len(self._blocks) - 1  # the newest one, once all slots are in use

    def begin(self, seat: Seat, start: Start) -> None:
        """The tokens before the first one that this request reads are in its slots."""
        seat.seen, context = start.seen, start.context
        self._protect(seat.number, bounds_of([start.spans], self.sizes.protected, 1, self.pages.device))
        if context is None:
            self.positions[:, seat.number, :, : start.seen] = self._all_slots[: start.seen]
            return
        held = context.positions.shape[-1]
        self.positions[:, seat.number, :, :held] = context.positions
        for layer, states in enumerate(zip(context.keys, context.values, strict=True)):
            self.pages.write(layer, self.pages.rows[seat.number, :held, None], *states)
        if held == self.capacity:
            self.block[:, seat.number] = context.block
            seat.full_at = context.full_at

    def _protect(self, number: int, bounds: Tensor) -> None:
        more = bounds.shape[1] - self.bounds.shape[1]
        if more > 0:
            self.bounds = torch.cat([self.bounds, self.bounds.new_full((len(self.bounds), more), NOWHERE)], dim=1)
        self.bounds[number] = NOWHERE
        self.bounds[number, : bounds.shape[1]] = bounds[0]

    def _protected(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Bool, which of the tokens `[L, n, ...]` of these rows are never evicted."""
        return inside(self.bounds[rows], positions.transpose(0, 1)).transpose(0, 1)

    # ---- where new tokens go --------------------------------------------------------------------------------------

    def slots(self, seats: Tensor, places: Tensor, overwriting: Tensor) -> Tensor:
        """`[L, n, S]` slots of new tokens.

        Args:
            seats: `[n]` of each token.
            places: `[n]` its slot, or its place in the block that is overwritten.
            overwriting: `[n]` bool, which of the two.
        """
        places = places[:, None]
        return torch.where(overwriting[:, None], self.block[:, seats] * self.block_size + places, places)

    def note(self, seats: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Tokens at `positions` `[n]` of these seats are in `slots` `[L, n, S]` now."""
        self.positions[self._each_layer, seats[:, None], self._each_set, slots] = positions[:, None]

    # ---- one token at a time: the lowest block goes ---------------------------------------------------------------

    def choose(self, seats: Sequence[Seat]) -> None:
        """Choose the next block to be overwritten in every layer of these requests, whose blocks are used up."""
        token_local = self._needs.token_local
        fresh = [seat for seat in seats if not (seat.scored and token_local)]
        known = [seat for seat in seats if seat.scored and token_local]
        if fresh:
            rows, seen = self._numbers(fresh)
            self._score(rows, seen, self._all_slots.expand(len(self._layers), len(fresh), len(self._each_set), -1))
        if known:  # only the block that was overwritten last lacks scores
            rows, seen = self._numbers(known)
            self._score(rows, seen, self.block[:, rows, :, None] * self.block_size + self._places)
        rows, seen = self._numbers(seats)
        self.block[:, rows] = self._lowest(rows, seen)
        for seat in seats:
            seat.scored = True

    def _numbers(self, seats: Sequence[Seat]) -> tuple[Tensor, Tensor]:
        """`[n]` rows of these seats, and the tokens that they have seen before the one that is about to come."""
        numbers = [(seat.number, seat.seen - 1) for seat in seats]  # which has been counted already
        rows, seen = torch.tensor(numbers, device=self.pages.device).unbind(-1)
        return rows, seen

    def _lowest(self, rows: Tensor, seen: Tensor) -> Tensor:
        """`[L, n, S]`, as `BlockTable.rank_of_blocks` orders them."""
        shape = (len(self._layers), len(rows), len(self._each_set), len(self._blocks), self.block_size)
        scores = self.scores[:, rows].view(shape).mean(-1)
        positions = self.positions[:, rows].view(shape)
        keys = rank_keys(scores, positions[..., 0], scores.isnan().logical_not(), self._needs.absolute_noise)
        safe = self._protected(rows, positions).any(-1) | (self._blocks == self.block[:, rows, :, None])
        if self.sizes.recent > self.block_size:  # fewer lie in the newest block
            safe |= positions[..., -1] >= (seen - self.sizes.recent)[:, None, None]
        return keys.masked_fill(safe, KEEP).argmin(-1)

    def _score(self, rows: Tensor, seen: Tensor, slots: Tensor) -> None:
        """Score what lies in `slots` `[L, n, S, m]` of these rows."""
        positions = self.positions[:, rows].gather(-1, slots)
        where = self.pages.rows[rows][:, None].expand(*slots.shape[:3], -1).gather(-1, slots)
        score = self._score_together if self._together else self._score_one_by_one
        self.scores[self._each_layer[..., None], rows[:, None, None], self._each_set[:, None], slots] = score(
            where, positions, seen
        )

    def _score_together(self, where: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        states = [self.pages.states(at, rows) for at, rows in enumerate(where)]
        keys, values = (torch.cat(parts) for parts in zip(*states, strict=True))
        stacked = positions.flatten(0, 1)
        return self._layers[0].scores.ask(keys, values, stacked, seen.repeat(len(where))).view(positions.shape)

    def _score_one_by_one(self, where: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        parts = [
            layer.scores.ask(*self.pages.states(at, rows), held, seen)
            for at, (layer, rows, held) in enumerate(zip(self._layers, where, positions, strict=True))
        ]
        return torch.stack(parts)

    # ---- several tokens: the best stay ----------------------------------------------------------------------------

    def keep_best(self, layer: int, seat: Seat, keys: Tensor, values: Tensor, held: int) -> None:
        """Of the tokens of a forward and those held before it, keep the best, ordered by position.

        Args:
            layer: place among the paged layers.
            seat: whose tokens these are; all of them are counted as seen.
            keys, values: `[held + new, H, D]`.
        """
        new = torch.arange(seat.seen - (len(keys) - held), seat.seen, device=self.pages.device)
        held_at = self.positions[layer, seat.number, :, :held]
        positions = torch.cat([held_at, new.expand(len(held_at), -1)], dim=-1)[None]
        seen = new[-1:] + 1
        states = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        scores = self._layers[layer].scores.ask(*states, positions, seen)
        rank = rank_keys(scores, positions, positions >= 0, self._needs.absolute_noise)
        safe = inside(self.bounds[[seat.number]], positions) | (positions > seen - 1 - self.sizes.recent)
        kept = best_tokens(rank.masked_fill(safe, KEEP), positions, self.capacity)
        self.positions[layer, seat.number] = positions.gather(-1, kept)[0]
        self.scores[layer, seat.number] = scores.gather(-1, kept)[0]
        self.block[layer, seat.number] = len(self._blocks) - 1
        from_ = kept[0].T[..., None].expand(-1, keys.shape[1], keys.shape[2])
        self.pages.write(layer, self.pages.rows[seat.number, :, None], keys.gather(0, from_), values.gather(0, from_))
