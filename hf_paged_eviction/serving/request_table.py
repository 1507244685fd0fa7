"""The bookkeeping of all live requests in all paged layers: which tokens are where, and which go next.

It decides as a `PagedEvictionCache` does for one unpadded row: a set takes in tokens in order; when it is full, the
block with the lowest score is overwritten; if several tokens do not fit, every layer chooses anew. The number of tokens
that a request has seen is on the host. Everything that differs between sets is a tensor with all requests, so a step
takes the same few operations for one request and for a hundred.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layer.paged import PagedLayer
from ..policies.scorer import Scorer
from ..queries.observers import Observers, Watched
from ..ranking import KEEP, best_within, rank_keys
from ..table.bounds import NOWHERE, bounds_of, inside
from ..table.budget import BlockBudget
from ..table.victims import ranks_of_blocks
from .layout import Layout
from .live_request import LiveRequest
from .pages import ALL, Kept, Pages, Tokens, grown


class RequestTable:
    """Positions, scores and victims.

    Shapes: `L` paged layers, `R` rows, `S` sets of tokens of a layer (1, or one for each KV head), `Q = L * S` sets in
    all, `P` block size, `n` requests of a call. `Pages` numbers the places of tokens.

    Attributes:
        layers: `L`.
        positions: `[places + 1]` int64, position of the token in each place. The last place is a dummy.
        scores: `[places + 1]` float32, as of the last choice.
        block: `[R, Q]` int64, the block of a full set that new tokens overwrite.
        bounds: `[R, n]` int64, protected spans of each request, see `table/bounds.py`.
        recent: `[R]` int64, number of newest tokens that are protected.
        observers: statistics of queries.
        early: whether each token is scored once, before it is rounded.

    Args:
        sizes: sizes of the largest request.
        layers: the layers that evict, in the order of the model; they score tokens.
        pages: keys and values.
        sets: `S`.
    """

    def __init__(self, sizes: BlockBudget, layers: Sequence[PagedLayer], pages: Pages, sets: int) -> None:
        self.sizes, self.pages, self.layers, self.sets = sizes, pages, len(layers), sets
        self.capacity, self.block_size = sizes.capacity, sizes.block_size
        self._needs, self._unequal = layers[0].needs, layers[0].state.budget.table.unequal
        self._scorers = [
            Scorer(layer.policy, layer.heads, layer.layer_idx, layer.local_heads, layer.rotary) for layer in layers
        ]
        self._together = (
            self._needs.token_local
            and not self._needs.by_layer
            and not self._needs.reads_budget
            and all(layer.rotary is layers[0].rotary for layer in layers)
        )
        self.early = pages.rounds and self._needs.token_local
        places = [(layer.local_heads, layer.rotary) for layer in layers]
        self.observers = Observers(layers[0].policy, sizes.block_size, places)
        device, all_sets = pages.device, len(layers) * sets
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(1, device=device)
        self.block = torch.zeros(0, all_sets, dtype=torch.int64, device=device)
        self.bounds = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self.recent = torch.zeros(0, dtype=torch.int64, device=device)
        self._layouts = torch.zeros(2, 0, all_sets, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.pages.device

    def of_layer(self, layer: int) -> slice:
        """The indices of the sets of a layer."""
        return slice(layer * self.sets, (layer + 1) * self.sets)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest, rows: int) -> None:
        """Add a request, whose pages are reserved; the table then has so many rows."""
        bounds = bounds_of([request.spans], self.sizes.protected, 1, self.device)
        self.block, self.recent, self.bounds = (
            grown(table, rows, value) for table, value in ((self.block, 0), (self.recent, 0), (self.bounds, NOWHERE))
        )
        self._layouts = grown(self._layouts.transpose(0, 1), rows).transpose(0, 1)
        self.positions, self.scores = (grown(table, self.pages.size + 1) for table in (self.positions, self.scores))
        self.bounds = grown(self.bounds.T, bounds.shape[1], NOWHERE).T.contiguous()
        self.bounds[request.number] = NOWHERE
        self.bounds[request.number, : bounds.shape[1]] = bounds[0]
        self.recent[request.number] = request.shares.sizes.recent
        self._note_layout(request, request.layout)
        self.observers.add(request.number, request.capacity)

    def give(self, request: LiveRequest, layout: Layout) -> None:
        """Change the layout of a request."""
        self.pages.give(request.number, layout.limits)
        self._note_layout(request, layout)

    def _note_layout(self, request: LiveRequest, layout: Layout) -> None:
        request.layout = layout
        self._layouts[:, request.number] = torch.tensor(
            [layout.limits, layout.full_at], dtype=torch.int64, device=self.device
        )

    # ---- where tokens are -----------------------------------------------------------------------------------------

    def next_places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The places `[n, Q]` of new tokens, which are noted.

        Args:
            rows, positions: `[n]` row and position of each token.
        """
        places = self.pages.places(rows, self.next_in_set(rows, positions)[..., None])[..., 0]
        self.positions[places] = positions[:, None].expand_as(places)
        return places

    def next_in_set(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The numbers `[n, Q]` of new tokens in their sets: behind the others, or in the block that is overwritten."""
        limits, full_at = self._layouts[:, rows]
        past = positions[:, None] - full_at
        in_block = self.block[rows] * self.block_size + past % self.block_size
        numbers: Tensor = torch.where(past < 0, limits + past, in_block)
        return numbers

    def held_in(self, rows: Tensor, seen: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """Number of tokens `[n, q]` in some sets after `seen` `[n]` tokens."""
        limits, full_at = self._layouts[:, rows][..., sets]
        held: Tensor = limits - (full_at - seen[:, None]).clamp_min(0)
        return held

    def held(
        self, layer: int, rows: Tensor, seen: Tensor, width: int, sets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The places `[n, S, width]` of the first tokens of each set, or of some sets, and a bool for those in use.

        An unused entry repeats the last used place. `seen` `[n]` is at least 1.
        """
        of_layer = self.of_layer(layer) if sets is None else sets + layer * self.sets
        count = self.held_in(rows, seen, of_layer)[..., None]
        at = torch.arange(width, device=self.device)
        return self.pages.places(rows, at.minimum(count - 1), of_layer), at < count

    def positions_in(self, places: Tensor, used: Tensor) -> Tensor:
        """Positions of the tokens in these places, -1 where unused."""
        return self.positions[places].masked_fill(~used, -1)

    # ---- one token at a time: the lowest block goes ---------------------------------------------------------------

    def choose(self, requests: Sequence[LiveRequest]) -> None:
        """Choose the next block to overwrite, for all sets of these requests whose block is used up."""
        full = [request for request in requests if request.seen - 1 >= request.layout.growing_until]
        if not full:
            return
        partly_scored = [request for request in full if request.scored and self._needs.token_local]
        if partly_scored and not self.early:
            self._score_blocks(partly_scored)
        fresh = [request for request in full if not (request.scored and self._needs.token_local)]
        groups = [[request] for request in fresh] if self._needs.queries else [fresh] if fresh else []
        for group in () if self.early else groups:
            self._score_all(group)
        rows, seen = self.numbers(full, coming=1)
        left = self._layouts[1, rows] - seen[:, None]  # places that have never held a token
        lowest = self._lowest(rows, seen, max(max(request.layout.limits) for request in full))
        self.block[rows] = torch.where((left <= 0) & (left % self.block_size == 0), lowest, self.block[rows])
        for request in full:
            request.scored = True

    def numbers(self, requests: Sequence[LiveRequest], coming: int = 0) -> tuple[Tensor, Tensor]:
        """`[n]` rows of these requests, and the tokens that they have seen before the last `coming`."""
        numbers = [(request.number, request.seen - coming) for request in requests]
        rows, seen = torch.tensor(numbers, device=self.device).unbind(-1)
        return rows, seen

    def _newest(self, rows: Tensor, seen: Tensor) -> Tensor:
        """`[n, Q]`, the block that new tokens came into last."""
        limits, full_at = self._layouts[:, rows]
        left = full_at - seen[:, None]
        newest: Tensor = torch.where(left < 0, self.block[rows], (limits - left - 1) // self.block_size)
        return newest

    def _lowest(self, rows: Tensor, seen: Tensor, most: int) -> Tensor:
        """`[n, Q]`, the block that goes first; `most` tokens that a set may hold."""
        size, limits = self.block_size, self._layouts[0, rows]
        at = torch.arange(most, device=self.device)
        places = self.pages.places(rows, at.minimum(limits[..., None] - 1))
        used = at < self.held_in(rows, seen)[..., None]
        by_block = self.positions_in(places, used).unflatten(-1, (-1, size))
        scores = self.scores[places].masked_fill(~used, torch.nan).unflatten(-1, (-1, size)).mean(-1)
        safe = inside(self.bounds[rows], by_block).any(-1) | (at[: most // size] >= (limits // size)[..., None])
        newest, recent = self._newest(rows, seen), seen - self.recent[rows]
        return ranks_of_blocks(scores, by_block, safe, newest, recent, self._needs.absolute_noise).argmin(-1)

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _room(self, requests: Sequence[LiveRequest], rows: Tensor, layer: int) -> int | Tensor:
        """Tokens that the sets of a layer may hold, as policies are told."""
        if self._unequal or len({request.capacity for request in requests}) > 1:
            return self._layouts[0, rows, self.of_layer(layer)][..., None]
        return requests[0].capacity

    def _score_all(self, requests: Sequence[LiveRequest]) -> None:
        rows, seen = self.numbers(requests, coming=1)
        for layer, scorer in enumerate(self._scorers):
            places, used = self.held(layer, rows, seen, self.width(layer, requests))
            positions = self.positions_in(places, used)
            observed = self.observers.statistics(requests[0].number, layer, positions)
            states = self.pages.read_first(layer, places)
            budget = self._room(requests, rows, layer)
            self._note_scores(places, used, scorer(*states, positions, seen, *observed, budget))

    def width(self, layer: int, requests: Sequence[LiveRequest]) -> int:
        """Largest number of tokens in a set of this layer, over these requests."""
        return max(max(request.layout.held(request.seen)[self.of_layer(layer)]) for request in requests)

    def _score_blocks(self, requests: Sequence[LiveRequest]) -> None:
        """Score the newest block of each set; the scores of the other blocks are known."""
        rows, seen = self.numbers(requests, coming=1)
        at = self._newest(rows, seen)[..., None] * self.block_size + torch.arange(self.block_size, device=self.device)
        used = at < self.held_in(rows, seen)[..., None]
        places = self.pages.places(rows, at).unflatten(1, (self.layers, self.sets))  # [n, L, S, P]
        used = used.view(places.shape)
        positions = self.positions_in(places, used)
        if self._together:
            keys, values = (part.flatten(0, 1) for part in self.pages.read_all(places))
            seen = seen.repeat_interleave(self.layers)
            scores = self._scorers[0](keys, values, positions.flatten(0, 1), seen).view(places.shape)
        else:
            scores = torch.stack(
                [
                    scorer(
                        *self.pages.read(layer, places[:, layer]),
                        positions[:, layer],
                        seen,
                        budget=self._room(requests, rows, layer),
                    )
                    for layer, scorer in enumerate(self._scorers)
                ],
                dim=1,
            )
        self._note_scores(places, used, scores)

    def _note_scores(self, places: Tensor, used: Tensor, scores: Tensor) -> None:
        self.scores[places.where(used, len(self.scores) - 1)] = scores

    # ---- several tokens: the best stay ----------------------------------------------------------------------------

    def best(self, request: LiveRequest, layer: int, layout: Layout, tokens: Watched, new: int) -> Kept:
        """Choose the best of the tokens of a forward and the tokens held before it.

        Args:
            request: the request; all its tokens are counted as seen.
            layout: the number of tokens of each set that stay.
            tokens: the tokens of this layer, of which the last `new` have just come.
        """
        keys, values, positions, observed = tokens
        row = torch.tensor([request.number], device=self.device)
        seen = torch.tensor([request.seen], device=self.device)
        of_layer = self.of_layer(layer)
        limits, held = layout.limits[of_layer], layout.held(request.seen)[of_layer]
        slots = torch.tensor([limits], dtype=torch.int64, device=self.device)
        budget = slots[..., None] if self._unequal else request.capacity
        if self.early:
            scores = self._known_and_new(request, layer, tokens, new)
        else:
            scores = self._scorers[layer](keys, values, positions, seen, *observed, budget)
        rank = rank_keys(scores, positions, positions >= 0, self._needs.absolute_noise)
        safe = inside(self.bounds[row], positions) | (positions > seen - 1 - request.shares.sizes.recent)
        kept_indices, at = best_within(rank.masked_fill(safe & (positions >= 0), KEEP), positions, slots, max(limits))
        # Where fewer are held than there are slots, places without a token come first: turn them to the end.
        places, count = torch.arange(max(limits), device=self.device), slots.new_tensor(held)[:, None]
        order = (places + slots[0, :, None] - count).clamp_max(max(limits) - 1)
        kept_indices, at = kept_indices[0].gather(-1, order), at[0].gather(-1, order).masked_fill(places >= count, -1)
        self.observers.settle(request.number, layer, kept_indices[None])
        flat = spread(range(0, len(held) * max(limits), max(limits)), held, self.device)
        kept = Kept(kept_indices, at, scores[0].gather(-1, kept_indices), flat)
        return kept._replace(states=self.pages.pick(request.number, layer, kept, keys, values, new))

    def put(self, request: LiveRequest, layer: int, kept: Kept) -> None:
        """Replace the tokens of a layer; the pages know how many its sets may hold."""
        row = torch.tensor([request.number], device=self.device)
        at = torch.arange(kept.positions.shape[1], device=self.device)
        places = self.pages.places(row, at.expand(1, self.sets, -1), self.of_layer(layer)).flatten()[kept.at]
        self.pages.put(layer, places, kept.states)
        self.positions[places] = kept.positions.flatten()[kept.at]
        self.scores[places] = kept.scores.flatten()[kept.at]

    # ---- several tokens that fit ----------------------------------------------------------------------------------

    def places_behind(self, request: LiveRequest, new: int) -> Tensor:
        """The places `[1, Q, new]` of the last `new` tokens of a request, all of which stay; they are noted."""
        row = torch.tensor([request.number], device=self.device)
        at = torch.arange(request.seen - new, request.seen, device=self.device)
        places = self.pages.places(row, at[None, None])
        self.positions[places] = at
        return places

    def append(self, request: LiveRequest, layer: int, places: Tensor, tokens: Tokens) -> None:
        """Write the last tokens of a layer to their places `[1, Q, new]`."""
        own = places[:, self.of_layer(layer)]
        if self.early:
            self.scores[own] = self._scores_of_new(request, layer, tokens, own.shape[-1])
        self.pages.append(layer, request.number, own, tokens)

    # ---- tokens that will be rounded: each is scored once, before -------------------------------------------------

    def _known_and_new(self, request: LiveRequest, layer: int, tokens: Watched, new: int) -> Tensor:
        """Scores `[1, S, n]` of the held tokens, which are known, and of `new` ones behind them."""
        row, count = (torch.tensor([number], device=self.device) for number in (request.number, request.seen - new))
        held, parts = tokens.keys.shape[2] - new, []
        if held:
            places, _ = self.held(layer, row, count, held)
            parts.append(self.scores[places])
        if new:
            parts.append(self._scores_of_new(request, layer, tokens[:3], new))
        return torch.cat(parts, dim=-1)

    def _scores_of_new(self, request: LiveRequest, layer: int, tokens: Tokens, new: int) -> Tensor:
        keys, values, positions = tokens
        seen = torch.tensor([request.seen], device=self.device)
        return self._scorers[layer](keys[:, :, -new:], values[:, :, -new:], positions[..., -new:], seen)

    def note_waiting(self, requests: Sequence[LiveRequest]) -> None:
        """Score the single tokens of requests that wait for their codes."""
        rows, seen = self.numbers(requests)
        for layer, newest in enumerate(self.pages.newest(rows) if self.early else ()):
            slots, positions, waits = (part[:, : self.sets] for part in (newest.slots, newest.positions, newest.waits))
            scores = self._scorers[layer](newest.keys, newest.values, positions, seen)
            self._note_scores(self.pages.places(rows, slots, self.of_layer(layer)), waits, scores)

    def encode(self, requests: Sequence[LiveRequest]) -> None:
        """Score the single tokens of requests that wait for their codes, and encode them."""
        self.note_waiting(requests)
        self.pages.encode(self.numbers(requests)[0])


def spread(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate ranges: `counts[i]` numbers from `starts[i]` on, `[sum of counts]` int64."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + counts[0], device=device)
    total = sum(counts)
    ends = torch.tensor([*counts], device=device)
    moved = torch.tensor([*starts], device=device) - (ends.cumsum(0) - ends)
    numbers: Tensor = moved.repeat_interleave(ends, output_size=total) + torch.arange(total, device=device)
    return numbers
