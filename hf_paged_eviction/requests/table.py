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
from ..policies import QueryCount, Statistics
from ..queries.observer import Observer
from ..ranking import KEEP, best_within, rank_keys
from ..table.bounds import bounds_of, inside
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
        observes: whether the policy needs statistics of queries.
        early: whether each token is scored once, before it is rounded: several tokens when they come, single tokens
            when their block is full.

    Args:
        sizes: sizes of the largest request.
        layers: the layers that evict, in the order of the model; they score tokens.
        pages: keys and values.
        sets: `S`.
    """

    def __init__(self, sizes: BlockBudget, layers: Sequence[PagedLayer], pages: Pages, sets: int) -> None:
        self.sizes, self.pages, self.layers, self.sets = sizes, pages, len(layers), sets
        self.block_size = sizes.block_size
        self._needs, self._unequal = layers[0].needs, layers[0].state.budget.table.unequal
        self._scorers, self.observes = [layer.state.scorer for layer in layers], self._needs.queries
        self._together = (
            self._needs.token_local
            and not self._needs.by_layer
            and not self._needs.reads_budget
            and all(layer.state.scorer.rotary is layers[0].state.scorer.rotary for layer in layers)
        )
        self.early = pages.rounds and self._needs.token_local
        device, all_sets = pages.device, len(layers) * sets
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(1, device=device)
        self.block = torch.zeros(0, all_sets, dtype=torch.int64, device=device)
        self._layouts = torch.zeros(0, 2, all_sets, dtype=torch.int64, device=device)  # limits, then `full_at`

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
        self.block, self._layouts = grown(self.block, rows), grown(self._layouts, rows)
        self.positions, self.scores = (grown(table, self.pages.size + 1) for table in (self.positions, self.scores))
        self._note_layout(request, request.layout)

    def give(self, request: LiveRequest, layout: Layout) -> None:
        """Change the layout of a request."""
        self.pages.give(request.number, layout.limits)
        self._note_layout(request, layout)

    def _note_layout(self, request: LiveRequest, layout: Layout) -> None:
        request.layout = layout
        self.give_row(request)

    def give_row(self, request: LiveRequest) -> None:
        """Note the layout of a request that takes another row."""
        layout = request.layout
        self._layouts[request.number] = torch.tensor([layout.limits, layout.full_at], device=self.device)

    def numbers(self, requests: Sequence[LiveRequest], coming: int = 0) -> tuple[Tensor, Tensor]:
        """`[n]` rows of these requests, and the tokens that they have seen before the last `coming`."""
        numbers = [(request.number, request.seen - coming) for request in requests]
        rows, seen = torch.tensor(numbers, device=self.device).unbind(-1)
        return rows, seen

    # ---- where tokens are -----------------------------------------------------------------------------------------

    def next_in_set(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The numbers `[n, Q]` of new tokens in their sets: behind the others, or in the block that is overwritten."""
        limits, full_at = self._layouts[rows].unbind(1)
        past = positions[:, None] - full_at
        in_block = self.block[rows] * self.block_size + past % self.block_size
        numbers: Tensor = torch.where(past < 0, limits + past, in_block)
        return numbers

    def held_in(self, rows: Tensor, seen: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """Number of tokens `[n, q]` in some sets after `seen` `[n]` tokens."""
        limits, full_at = self._layouts[rows][..., sets].unbind(1)
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

    def tokens(self, request: LiveRequest, layer: int, seen: int) -> Tokens:
        """The tokens that a request holds in a layer after `seen` tokens; positions are -1 behind the last of a set."""
        row, count = (torch.tensor([number], device=self.device) for number in (request.number, seen))
        width = max(request.layout.held(seen)[self.of_layer(layer)])
        places, used = self.held(layer, row, count, width)
        return (*self.pages.read_first(layer, places), self.positions[places].masked_fill(~used, -1))

    # ---- one token at a time: the lowest block goes ---------------------------------------------------------------

    def choose(self, requests: Sequence[LiveRequest]) -> None:
        """Choose the next block to overwrite, for all sets of these requests whose block is used up."""
        full = [request for request in requests if request.seen - 1 >= request.layout.growing_until]
        if self.early:
            self.score_newest([request for request in requests if request.seen > 1], coming=1)
        else:
            self.score_newest([request for request in full if request.scored], coming=1)
            unknown = [request for request in full if not request.scored]
            groups = [[request] for request in unknown] if self._needs.queries else [unknown] if unknown else []
            for group in groups:
                self._score_all(group)
        if not full:
            return
        rows, seen = self.numbers(full, coming=1)
        left = self._layouts[rows, 1] - seen[:, None]  # places that have never held a token
        lowest = self._lowest(full, rows, seen)
        self.block[rows] = torch.where((left <= 0) & (left % self.block_size == 0), lowest, self.block[rows])
        for request in full:
            request.scored = self._needs.token_local

    def _lowest(self, requests: Sequence[LiveRequest], rows: Tensor, seen: Tensor) -> Tensor:
        """`[n, Q]`, the block that goes first."""
        size, limits = self.block_size, self._layouts[rows, 0]
        most = max(max(request.layout.limits) for request in requests)
        at = torch.arange(most, device=self.device)
        places = self.pages.places(rows, at.minimum(limits[..., None] - 1))
        unused = at >= self.held_in(rows, seen)[..., None]
        by_block = self.positions[places].masked_fill(unused, -1).unflatten(-1, (-1, size))
        scores = self.scores[places].masked_fill(unused, torch.nan).unflatten(-1, (-1, size)).mean(-1)
        beyond = at[: most // size] >= (limits // size)[..., None]
        safe = inside(self._bounds(requests), by_block).any(-1) | beyond
        newest = self._newest_block(rows, seen)
        recent = seen - torch.tensor([request.shares.sizes.recent for request in requests], device=self.device)
        return ranks_of_blocks(scores, by_block, safe, newest, recent, self._needs.absolute_noise).argmin(-1)

    def _bounds(self, requests: Sequence[LiveRequest]) -> Tensor:
        """Protected spans, see `table/bounds.py`."""
        spans = [request.spans for request in requests]
        return bounds_of(spans, self.sizes.protected, len(requests), self.device)

    def _newest_block(self, rows: Tensor, seen: Tensor) -> Tensor:
        """`[n, Q]`, the block that the last token came into."""
        return self.next_in_set(rows, seen - 1) // self.block_size

    # ---- queries --------------------------------------------------------------------------------------------------

    def observer(self, request: LiveRequest, layer: int, key: Tensor) -> Observer:
        """The statistics of a layer of a request, which has keys like these."""
        if not request.observers:
            request.observers = [
                Observer(scorer.policy, self.block_size, scorer.local_heads, scorer.rotary) for scorer in self._scorers
            ]
            for observer in request.observers:
                observer.start(1, key.shape[1], request.capacity, key.device)
        return request.observers[layer]

    def _observed(self, request: LiveRequest, layer: int, positions: Tensor) -> tuple[Statistics, QueryCount | None]:
        """What the policy is told of the tokens at `positions` `[1, S, n]`, in slot order."""
        if not request.observers:
            return {}, None
        observer = request.observers[layer]
        return observer.statistics(positions), observer.count

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _budget(self, requests: Sequence[LiveRequest], limits: Tensor) -> int | Tensor:
        """Tokens that sets with these `limits` `[n, S]` may hold, as policies are told."""
        capacities = {request.capacity for request in requests}
        return limits[..., None] if self._unequal or len(capacities) > 1 else capacities.pop()

    def _score_all(self, requests: Sequence[LiveRequest]) -> None:
        rows, seen = self.numbers(requests, coming=1)
        for layer, scorer in enumerate(self._scorers):
            of_layer = self.of_layer(layer)
            width = max(max(request.layout.held(request.seen)[of_layer]) for request in requests)
            places, used = self.held(layer, rows, seen, width)
            positions = self.positions[places].masked_fill(~used, -1)
            observed = self._observed(requests[0], layer, positions)
            budget = self._budget(requests, self._layouts[rows, 0, of_layer])
            scores = scorer(*self.pages.read_first(layer, places), positions, seen, *observed, budget)
            self._note_scores(places, used, scores)

    def score_newest(self, requests: Sequence[LiveRequest], coming: int = 0) -> None:
        """Score the newest block of each set, before the last `coming` tokens; the scores of other blocks are known."""
        if not requests:
            return
        rows, seen = self.numbers(requests, coming)
        at = self._newest_block(rows, seen)[..., None] * self.block_size
        at = at + torch.arange(self.block_size, device=self.device)
        used = at < self.held_in(rows, seen)[..., None]
        places = self.pages.places(rows, at).unflatten(1, (self.layers, self.sets))  # [n, L, S, P]
        used = used.view(places.shape)
        positions = self.positions[places].masked_fill(~used, -1)
        keys, values = self.pages.newest(places)
        if self._together:
            states = keys.flatten(0, 1), values.flatten(0, 1), positions.flatten(0, 1)
            scores = self._scorers[0](*states, seen.repeat_interleave(self.layers)).view(places.shape)
        else:
            limits = self._layouts[rows, 0].unflatten(1, (self.layers, self.sets))
            of_layers = []
            for layer, scorer in enumerate(self._scorers):
                budget = self._budget(requests, limits[:, layer])
                of_layers.append(scorer(keys[:, layer], values[:, layer], positions[:, layer], seen, budget=budget))
            scores = torch.stack(of_layers, dim=1)
        self._note_scores(places, used, scores)

    def _note_scores(self, places: Tensor, used: Tensor, scores: Tensor) -> None:
        self.scores[places.where(used, len(self.scores) - 1)] = scores

    # ---- several tokens: the best stay ----------------------------------------------------------------------------

    def best(self, request: LiveRequest, layer: int, layout: Layout, tokens: Tokens, new: int) -> Kept:
        """Choose the best of the tokens of a forward and the tokens held before it.

        Args:
            request: the request; all its tokens are counted as seen.
            layout: the number of tokens of each set that stay.
            tokens: the tokens of this layer, of which the last `new` have just come.
        """
        keys, values, positions = tokens
        (_, seen), of_layer = self.numbers([request]), self.of_layer(layer)
        limits, width = torch.tensor([layout.limits[of_layer]], device=self.device), max(layout.limits[of_layer])
        held = torch.tensor([layout.held(request.seen)[of_layer]], device=self.device)
        if self.early:
            scores = self._known_and_new(request, layer, tokens, new)
        else:
            observed = self._observed(request, layer, positions)
            scores = self._scorers[layer](keys, values, positions, seen, *observed, self._budget([request], limits))
        rank = rank_keys(scores, positions, positions >= 0, self._needs.absolute_noise)
        safe = inside(self._bounds([request]), positions) | (positions > seen - 1 - request.shares.sizes.recent)
        (indices,), (at,) = best_within(rank.masked_fill(safe, KEEP), positions, held, width)
        slots = torch.arange(width, device=self.device).minimum(held[0, :, None] - 1)
        indices = indices.gather(-1, slots)
        if self.observes:
            request.observers[layer].settle(indices[None], width)
        kept = Kept(indices, at, slots, scores[0].gather(-1, indices))
        return kept._replace(states=self.pages.pick(request.number, layer, kept, keys, values, new))

    def all_of(self, request: LiveRequest, layer: int, tokens: Tokens, new: int) -> Kept:
        """All of these tokens, where they fit; the held ones stay where they are."""
        keys, values, positions = tokens
        at = torch.arange(positions.shape[-1], device=self.device).expand(self.sets, -1)
        scores = self._known_and_new(request, layer, tokens, new)[0] if self.early else None
        kept = Kept(at, positions[0], at, scores, first=positions.shape[-1] - new)
        return kept._replace(states=self.pages.pick(request.number, layer, kept, keys, values, new))

    def put(self, request: LiveRequest, layer: int, kept: Kept) -> None:
        """Write the tokens of a layer that stay; the pages know how many its sets may hold."""
        row, of_layer = torch.tensor([request.number], device=self.device), self.of_layer(layer)
        places = self.pages.places(row, kept.slots[None, :, kept.first :], of_layer)
        self.pages.write(layer, places.flatten(), kept.states)
        self.positions[places[0]] = kept.positions.gather(-1, kept.slots)[:, kept.first :]
        if kept.scores is not None:
            self.scores[places[0]] = kept.scores[:, kept.first :]
            request.scored = self._needs.token_local

    def _known_and_new(self, request: LiveRequest, layer: int, tokens: Tokens, new: int) -> Tensor:
        """Scores `[1, S, n]` of the held tokens, which are known, and of `new` ones, which will be rounded."""
        (row, seen), (keys, values, positions) = self.numbers([request]), tokens
        held = keys.shape[2] - new
        scores = self.scores[self.held(layer, row, seen - new, held)[0]]
        if not new:
            return scores
        came = keys[:, :, held:], values[:, :, held:], positions[..., held:]
        return torch.cat([scores, self._scorers[layer](*came, seen)], dim=-1)

    def encode(self, requests: Sequence[LiveRequest]) -> None:
        """Encode the single tokens of requests that wait for their codes; a request that has none begins with a block
        of them."""
        self.pages.encode(self.numbers(requests)[0], [request.number for request in requests if not request.coded])
