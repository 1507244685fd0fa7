"""The bookkeeping of all live requests in all paged layers: tokens, slots and victims.

It decides as a `PagedEvictionCache` does for one unpadded row: slots are filled in order; after that, the block with
the lowest score is overwritten; if several tokens do not fit, every layer chooses anew. The number of tokens that a
request has seen is on the host. Everything that differs between sets is a tensor with all requests, so a step takes the
same few operations for one request and for a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layer.paged import PagedLayer
from ..policies.scorer import Scorer
from ..queries.observers import Observers, Watched
from ..ranking import KEEP, best_within, rank_keys
from ..table.bounds import NOWHERE, bounds_of, inside
from ..table.budget import BlockBudget
from .contexts import ServedContext
from .layout import Layout
from .live_requests import LiveRequest
from .pages import Pages
from .start import Start


@dataclass(frozen=True)
class Kept:
    """The tokens of a layer that stay after a forward of several tokens.

    Attributes:
        held: number of tokens of each set.
        positions: `[S, n]` int64, in the order of the text, -1 behind the last.
        scores: `[S, n]` float32.
        keys, values: `[sum of held, G, D]`, set by set.
    """

    held: list[int]
    positions: Tensor
    scores: Tensor
    keys: Tensor
    values: Tensor


class RequestTable:
    """Positions, scores and victims.

    Shapes: `L` paged layers, `R` rows, `S` sets of tokens of a layer (1, or one for each KV head), `Q = L * S` sets in
    all, `C` budget, `P` block size, `N = Q * C` slots of a request, `n` requests of a call.

    Attributes:
        layers: `L`.
        positions: `[R, N + 1]` int64, position of the token in each slot, -1 = no token. The last slot is a dummy.
        scores: `[R, N + 1]` float32, as of the last choice.
        block: `[R, Q]` int64, the block of a set that new tokens overwrite: the newest one.
        bounds: `[R, n]` int64, protected spans of each request, see `table/bounds.py`.
        recent: `[R]` int64, number of newest tokens that are protected.
        observers: statistics of queries.

    Args:
        sizes: sizes of the largest request.
        layers: the layers that evict, in the order of the model; they score tokens.
        pages: keys and values.
        sets: `S`.
    """

    def __init__(self, sizes: BlockBudget, layers: Sequence[PagedLayer], pages: Pages, sets: int) -> None:
        self.sizes, self.pages, self.layers, self.sets = sizes, pages, len(layers), sets
        self.capacity, self.block_size = sizes.capacity, sizes.block_size
        self._needs, self._unequal = layers[0].needs, layers[0].state.budget.split.unequal
        self._scorers = [
            Scorer(layer.policy, layer.heads, layer.layer_idx, layer.local_heads, layer.rotary) for layer in layers
        ]
        self._together = (
            self._needs.token_local
            and not self._needs.by_layer
            and not self._needs.reads_budget
            and all(layer.rotary is layers[0].rotary for layer in layers)
        )
        self.observers = Observers(layers[0].policy, sizes.block_size, layers)
        device, all_sets = pages.device, len(layers) * sets
        self._slots = all_sets * self.capacity
        self.positions = torch.zeros(0, self._slots + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(0, self._slots + 1, device=device)
        self.block = torch.zeros(0, all_sets, dtype=torch.int64, device=device)
        self.bounds = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self.recent = torch.zeros(0, dtype=torch.int64, device=device)
        self._layouts = torch.zeros(3, 0, all_sets, dtype=torch.int64, device=device)
        self._places = torch.arange(self.block_size, device=device)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.pages.device

    def first_layout(self, capacity: int, width: int) -> Layout:
        """The first layout of a request with this budget and room for `width` tokens in each set."""
        return Layout.equal(self.layers * self.sets, capacity, min(width, capacity))

    def of_layer(self, layer: int) -> slice:
        """The indices of the sets of a layer."""
        return slice(layer * self.sets, (layer + 1) * self.sets)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest, rows: int) -> None:
        """Add a request; the table then has so many rows."""
        more = rows - len(self.block)
        if more > 0:
            grown = [
                torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
                for tensor in (self.positions, self.scores, self.block, self.bounds, self.recent)
            ]
            layouts = torch.cat([self._layouts, self._layouts.new_zeros(3, more, self.block.shape[1])], dim=1)
            # All or none of them, whatever fails.
            self.positions, self.scores, self.block, self.bounds, self.recent = grown
            self._layouts = layouts
        self.positions[request.number] = -1
        self.scores[request.number] = torch.nan
        self.recent[request.number] = request.shares.sizes.recent
        self.give(request, request.layout)
        self.observers.add(request.number, request.capacity)

    def give(self, request: LiveRequest, layout: Layout) -> None:
        """Set the layout of a request."""
        request.layout = layout
        self._layouts[:, request.number] = torch.tensor(
            [layout.limits, layout.starts, layout.full_at], dtype=torch.int64, device=self.device
        )

    def begin(self, request: LiveRequest, start: Start) -> None:
        """Begin a request whose slots hold the tokens of its context."""
        request.seen, context = start.seen, start.context
        self._protect(request.number, bounds_of([start.spans], self.sizes.protected, 1, self.device))
        if context is not None and context.limits is not None:
            self.give(request, Layout.of(context.limits, context.full_at))
        self.grown(request)
        slots = self.in_use(request)
        if context is None:
            held = torch.arange(request.seen, device=self.device)
            self.positions[request.number, slots] = held.repeat(self.block.shape[1])
            return
        self.positions[request.number, slots] = context.positions
        self.pages.write(self.pages.rows[request.number, slots], context.keys, context.values)
        if context.block is not None:
            self.block[request.number] = context.block
        self.observers.give(request.number, context.observed)

    def context(self, request: LiveRequest, start: Start) -> ServedContext:
        """The present tokens of a request, as a context for others."""
        slots, full = self.in_use(request), request.seen > request.capacity
        rows = self.pages.rows[request.number, slots]
        return ServedContext(
            request.seen,
            request.layout.limits if full else None,
            request.layout.full_at,
            self.positions[request.number, slots],
            self.pages.keys.index_select(0, rows),
            self.pages.values.index_select(0, rows),
            self.block[request.number].clone() if full else None,
            start.spans,
            self.observers.copies(request.number),
        )

    def in_use(self, request: LiveRequest) -> Tensor:
        """The slots with tokens, set by set."""
        return spread(request.layout.starts, request.layout.held(request.seen), self.device)

    def grown(self, request: LiveRequest) -> None:
        """Called after several tokens were appended or chosen: the last block is the newest."""
        limits, _, full_at = self._layouts[:, request.number]
        held = limits - (full_at - request.seen).clamp_min(0)
        self.block[request.number] = (held - 1).clamp_min(0) // self.block_size

    def _protect(self, number: int, bounds: Tensor) -> None:
        more = bounds.shape[1] - self.bounds.shape[1]
        if more > 0:
            self.bounds = torch.cat([self.bounds, self.bounds.new_full((len(self.bounds), more), NOWHERE)], dim=1)
        self.bounds[number] = NOWHERE
        self.bounds[number, : bounds.shape[1]] = bounds[0]

    # ---- where tokens are -----------------------------------------------------------------------------------------

    def slots(self, rows: Tensor, positions: Tensor, behind: Tensor) -> Tensor:
        """The slots `[n, Q]` of new tokens.

        Args:
            rows, positions: `[n]` row and position of each token.
            behind: `[n]` bool, whether the token is appended, whichever block is being overwritten.
        """
        _, starts, full_at = self._layouts[:, rows]
        at = positions[:, None]
        in_block = self.block[rows] * self.block_size + (at - full_at) % self.block_size
        slots: Tensor = starts + torch.where(behind[:, None], at, in_block)
        return slots

    def note(self, rows: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Store that the tokens at `positions` `[n]` of these rows are in `slots` `[n, Q]`."""
        self.positions[rows[:, None], slots] = positions[:, None].expand_as(slots)

    def held(
        self, layer: int, rows: Tensor, seen: Tensor, width: int, sets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The slots `[n, S, width]` of the first tokens of each set, or of some sets, and a bool for those in use.

        An unused entry repeats the last used slot. `seen` `[n]` is at least 1.
        """
        limits, starts, full_at = self._layouts[:, rows, self.of_layer(layer)]
        if sets is not None:
            limits, starts, full_at = limits[:, sets], starts[:, sets], full_at[:, sets]
        count = (limits - (full_at - seen[:, None]).clamp_min(0))[..., None]
        places = torch.arange(width, device=self.device)
        return starts[..., None] + places.minimum(count - 1), places < count

    def states(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in `slots` `[n, S, m]` of these rows: `[n, H, m, D]`."""
        where = self.pages.rows[rows].gather(1, slots.flatten(1)).view(slots.shape)
        return self.pages.read(where)

    def positions_in(self, rows: Tensor, slots: Tensor, used: Tensor) -> Tensor:
        """Positions `[n, S, m]` of the tokens in these slots, -1 for unused slots."""
        return self.positions[rows].gather(1, slots.flatten(1)).view(slots.shape).masked_fill(~used, -1)

    # ---- one token at a time: the lowest block goes ---------------------------------------------------------------

    def choose(self, requests: Sequence[LiveRequest]) -> None:
        """Choose the next block to overwrite, for all sets of these requests whose block is used up."""
        for request in requests:
            if request.seen - 1 < request.layout.growing_until:  # its next token is already counted
                self.block[request.number] = (request.seen - 1) // self.block_size
        full = [request for request in requests if request.seen - 1 >= request.layout.growing_until]
        if not full:
            return
        partly_scored = [request for request in full if request.scored and self._needs.token_local]
        if partly_scored:
            self._score_blocks(partly_scored)
        fresh = [request for request in full if not (request.scored and self._needs.token_local)]
        for group in [[request] for request in fresh] if self._needs.queries else [fresh] if fresh else []:
            self._score_all(group)
        rows, seen = self._numbers(full)
        limits, _, full_at = self._layouts[:, rows]
        left = full_at - seen[:, None]  # places that have never held a token
        lowest = self._lowest(rows, seen, max(max(request.layout.limits) for request in full))
        chosen = torch.where(left > 0, (limits - left) // self.block_size, lowest)
        self.block[rows] = torch.where(left % self.block_size == 0, chosen, self.block[rows])
        for request in full:
            request.scored = True

    def _numbers(self, requests: Sequence[LiveRequest]) -> tuple[Tensor, Tensor]:
        """`[n]` rows of these requests, and the tokens that they have seen before the one that is about to come."""
        numbers = [(request.number, request.seen - 1) for request in requests]
        rows, seen = torch.tensor(numbers, device=self.device).unbind(-1)
        return rows, seen

    def _lowest(self, rows: Tensor, seen: Tensor, most: int) -> Tensor:
        """`[n, Q]`, as `BlockTable.rank_of_blocks` orders them; `most` slots that a set has."""
        size = self.block_size
        limits, starts, _ = self._layouts[:, rows]
        blocks = torch.arange(most // size, device=self.device)
        inside_set = blocks < (limits // size)[..., None]
        where = ((starts // size)[..., None] + blocks).where(inside_set, 0)  # [n, Q, blocks]
        by_block = self.positions[rows, : self._slots].view(len(rows), -1, size)
        protected = inside(self.bounds[rows], by_block).any(-1)
        scores = self.scores[rows, : self._slots].view(by_block.shape).mean(-1)

        def of_sets(numbers: Tensor) -> Tensor:
            return numbers.gather(1, where.flatten(1)).view(where.shape)

        scores = of_sets(scores).masked_fill(~inside_set, torch.nan)
        keys = rank_keys(scores, of_sets(by_block[..., 0]), ~scores.isnan(), self._needs.absolute_noise)
        safe = of_sets(protected) | (blocks == self.block[rows][..., None]) | ~inside_set
        safe |= of_sets(by_block[..., -1]) >= (seen - self.recent[rows])[:, None, None]
        return keys.masked_fill(safe, KEEP).argmin(-1)

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _room(self, requests: Sequence[LiveRequest], rows: Tensor, layer: int) -> int | Tensor:
        """Tokens that the sets of a layer may hold, as policies are told."""
        if self._unequal or len({request.capacity for request in requests}) > 1:
            return self._layouts[0, rows, self.of_layer(layer)][..., None]
        return requests[0].capacity

    def _score_all(self, requests: Sequence[LiveRequest]) -> None:
        rows, seen = self._numbers(requests)
        for layer, scorer in enumerate(self._scorers):
            slots, used = self.held(layer, rows, seen, self.width(layer, requests))
            positions = self.positions_in(rows, slots, used)
            observed = self.observers.statistics(requests[0].number, layer, positions)
            scores = scorer(*self.states(rows, slots), positions, seen, *observed, self._room(requests, rows, layer))
            self._note_scores(rows, slots.where(used, self._slots), scores)

    def width(self, layer: int, requests: Sequence[LiveRequest]) -> int:
        """Largest number of tokens in a set of this layer, over these requests."""
        return max(max(request.layout.held(request.seen)[self.of_layer(layer)]) for request in requests)

    def _score_blocks(self, requests: Sequence[LiveRequest]) -> None:
        """Score the newest block of each set; the scores of the other blocks are known."""
        rows, seen = self._numbers(requests)
        starts = self._layouts[1, rows][..., None]
        slots = starts + self.block[rows][..., None] * self.block_size + self._places  # [n, Q, P]
        positions = self.positions[rows].gather(1, slots.flatten(1)).view(slots.shape)
        used = positions >= 0
        where = self.pages.rows[rows].gather(1, slots.where(used, starts).flatten(1))
        shape = (len(rows), self.layers, self.sets, self.block_size)
        where, positions = where.view(shape), positions.view(shape)
        if self._together:
            states = self.pages.read(where.flatten(0, 1))
            seen = seen.repeat_interleave(self.layers)
            scores = self._scorers[0](*states, positions.flatten(0, 1), seen)
        else:
            scores = torch.stack(
                [
                    scorer(
                        *self.pages.read(where[:, at]), positions[:, at], seen, budget=self._room(requests, rows, at)
                    )
                    for at, scorer in enumerate(self._scorers)
                ],
                dim=1,
            )
        self._note_scores(rows, slots.where(used, self._slots), scores.view(slots.shape))

    def _note_scores(self, rows: Tensor, slots: Tensor, scores: Tensor) -> None:
        self.scores[rows[:, None, None], slots] = scores

    # ---- several tokens: the best stay ----------------------------------------------------------------------------

    def best(self, request: LiveRequest, layer: int, layout: Layout, tokens: Watched) -> Kept:
        """Choose the best of the tokens of a forward and the tokens held before it.

        Args:
            request: the request; all its tokens are counted as seen.
            layout: the number of tokens of each set that stay.
            tokens: the tokens of this layer.
        """
        keys, values, positions, observed = tokens
        row = torch.tensor([request.number], device=self.device)
        seen = torch.tensor([request.seen], device=self.device)
        of_layer = self.of_layer(layer)
        limits, held = layout.limits[of_layer], layout.held(request.seen)[of_layer]
        slots = torch.tensor([limits], dtype=torch.int64, device=self.device)
        budget = slots[..., None] if self._unequal else request.capacity
        scores = self._scorers[layer](keys, values, positions, seen, *observed, budget)
        rank = rank_keys(scores, positions, positions >= 0, self._needs.absolute_noise)
        safe = inside(self.bounds[row], positions) | (positions > seen - 1 - request.shares.sizes.recent)
        kept_indices, at = best_within(rank.masked_fill(safe & (positions >= 0), KEEP), positions, slots, max(limits))
        # Where fewer are held than there are slots, places without a token come first: turn them to the end.
        places, count = torch.arange(max(limits), device=self.device), slots.new_tensor(held)[:, None]
        order = (places + slots[0, :, None] - count).clamp_max(max(limits) - 1)
        used = places < count
        kept_indices, at = kept_indices[0].gather(-1, order), at[0].gather(-1, order).masked_fill(~used, -1)
        self.observers.settle(request.number, layer, kept_indices[None])
        flat = spread(range(0, len(held) * max(limits), max(limits)), held, self.device)
        chosen = (kept_indices + torch.arange(self.sets, device=self.device)[:, None] * keys.shape[2]).flatten()[flat]
        states = (self._of_sets(tensor)[chosen] for tensor in (keys, values))
        return Kept(list(held), at, scores[0].gather(-1, kept_indices).masked_fill(~used, torch.nan), *states)

    def _of_sets(self, states: Tensor) -> Tensor:
        """`[1, H, n, D]` as `[S * n, G, D]`."""
        by_set: Tensor = states[0].unflatten(0, (self.sets, -1))
        return by_set.transpose(1, 2).flatten(0, 1)

    def put(self, request: LiveRequest, layer: int, layout: Layout, tokens: Kept) -> None:
        """Replace the tokens of a layer."""
        of_layer = self.of_layer(layer)
        starts, limits = layout.starts[of_layer], layout.limits[of_layer]
        rows = self.pages.rows[request.number]
        self.pages.write(rows[spread(starts, tokens.held, self.device)], tokens.keys, tokens.values)
        slots = spread(starts, limits, self.device)
        width = tokens.positions.shape[1]
        flat = spread(range(0, len(limits) * width, width), limits, self.device)
        self.positions[request.number, slots] = tokens.positions.flatten()[flat]
        self.scores[request.number, slots] = tokens.scores.flatten()[flat]


def spread(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate ranges: `counts[i]` numbers from `starts[i]` on, `[sum of counts]` int64."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + counts[0], device=device)
    total = sum(counts)
    ends = torch.tensor([*counts], device=device)
    moved = torch.tensor([*starts], device=device) - (ends.cumsum(0) - ends)
    numbers: Tensor = moved.repeat_interleave(ends, output_size=total) + torch.arange(total, device=device)
    return numbers
