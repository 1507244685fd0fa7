"""Which token lies where, which block goes next, and which tokens stay: of all requests and layers of a group.

Positions and scores lie beside the slots that they belong to, so they go where the blocks go. What belongs to a request
(limits, the block that is overwritten, protected spans) has a row in small tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import KEEP, Observers, Watched, best_within, bounds_of, inside, rank_keys

from .pages import Pages
from .request import Request
from .sets import Sets
from .settings import Layer, Settings


class Table:
    """The slots of one group of layers.

    Shapes: `L` layers, `S` sets, `N` slots of a page, `P` block size of eviction, `R` rows for requests.

    Attributes:
        positions: `[L, pages * N]` int64, position of the token in each slot.
        limits, full_at: `[R, L, S]` int64, or `[R, 1, 1]` if all sets are equal, see `Sets`.
        victims: `[R, L, S]` int64, the block that is being overwritten.
        own_pages: `[R, L, S, width]` int64, see `pages_of`; None if all sets are equal.

    Args:
        settings: what requests get.
        layers: the layers of the group.
        pages: their keys and values.
        sets: `S`.
        rows: `R`.
        width: most pages of a set.
    """

    def __init__(
        self, settings: Settings, layers: Sequence[Layer], pages: Sequence[Pages], sets: int, rows: int, width: int
    ) -> None:
        self.settings, self.pages, self.sets = settings, pages, sets
        self.needs, self.block_size = settings.policy.needs, settings.sizes.block_size
        self.slots = pages[0].slots
        memory = pages[0].memory
        self.device, places = memory.device, memory.shape[0] * self.slots
        if sets == 1:
            self.heads = memory.shape[1]
        else:
            self.heads = sets * memory.shape[1]
        self.layers = len(layers)
        self.positions = torch.full((self.layers, places), -1, dtype=torch.int64, device=self.device)
        self._scores: Tensor | None = None
        if self.needs.token_local:
            self._scores = torch.zeros(self.layers, places, device=self.device)
        self.scorers = [settings.scorer(layer) for layer in layers]
        for scorer in self.scorers:
            scorer.sets(self.heads)
        shape = (rows, self.layers, sets) if settings.unequal else (rows, 1, 1)
        self.limits, self.full_at = (torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(2))
        self.victims = torch.zeros(rows, self.layers, sets, dtype=torch.int64, device=self.device)
        self.own_pages: Tensor | None = None
        if settings.unequal:
            own = torch.arange(width, device=self.device) * sets + torch.arange(sets, device=self.device)[:, None]
            self.own_pages = own.expand(rows, self.layers, -1, -1).clone()
        self.bounds = torch.zeros(rows, 2, dtype=torch.int64, device=self.device)
        self.recent = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.observers = Observers(settings.policy, settings.sizes.block_size, layers)
        self._set_numbers = torch.arange(sets, device=self.device)

    def begin(self, request: Request) -> None:
        """A request takes its row."""
        row = request.row
        bounds = bounds_of([request.spans], request.sizes.protected, 1, self.device)
        more = bounds.shape[1] - self.bounds.shape[1]
        if more > 0:
            nowhere = torch.iinfo(torch.int64).max
            self.bounds = torch.cat([self.bounds, self.bounds.new_full((len(self.bounds), more), nowhere)], dim=1)
        self.bounds[row] = torch.iinfo(torch.int64).max
        self.bounds[row, : bounds.shape[1]] = bounds[0]
        self.recent[row] = request.sizes.recent
        self.observers.add(row, request.sizes.capacity)
        self.give(request, request.sets)
        if self.own_pages is not None:
            width = self.own_pages.shape[-1]
            self.own_pages[row] = torch.arange(width, device=self.device) * self.sets + self._set_numbers[:, None]

    def give(self, request: Request, sets: Sets) -> None:
        """A request's sets change."""
        request.sets = sets
        pair = torch.from_numpy(sets.limits).to(self.device), torch.from_numpy(sets.full_at).to(self.device)
        self.limits[request.row], self.full_at[request.row] = pair

    # ---- slots ----------------------------------------------------------------------------------------------------

    def page(self, rows: Tensor, blocks: Tensor, at: Tensor) -> Tensor:
        """The pages in which the sets have their `at`-th pages.

        Args:
            rows: `[n]` rows of requests.
            blocks: `[n, width]` their blocks.
            at: `[n, 1 or L, 1 or S, m]`.

        Returns:
            `[n, 1 or L, S, m]`.
        """
        numbers = self.sets_numbers(at.expand(len(rows), -1, -1, -1))
        if self.own_pages is not None:
            own = self.own_pages[rows]
            shape = (*own.shape[:3], at.shape[-1])
            numbers = own.gather(-1, at.expand(shape).clamp_max(own.shape[-1] - 1))
        return self.numbered(blocks, numbers)

    def sets_numbers(self, at: Tensor) -> Tensor:
        """Page numbers `[n, ., S, m]` of the sets' own pages of the blocks `at`."""
        return at * self.sets + self._set_numbers[:, None]

    def numbered(self, blocks: Tensor, numbers: Tensor) -> Tensor:
        """The pages with these numbers `[n, ...]` of the requests that own the blocks `[n, width]`."""
        places = (numbers // self.sets).flatten(1).clamp_max(blocks.shape[1] - 1)
        return blocks.gather(1, places).view(numbers.shape) * self.sets + numbers % self.sets

    def flat(self, rows: Tensor, blocks: Tensor, slots: Tensor) -> Tensor:
        """The places in memory `[n, 1 or L, S, m]` of the sets' slots `[n, 1 or L, 1 or S, m]`."""
        return self.page(rows, blocks, slots // self.slots) * self.slots + slots % self.slots

    def per_layer(self, places: Tensor) -> Tensor:
        """`[n, 1 or L, S, m]` as `[L, n, S, m]`."""
        return places.expand(-1, self.layers, -1, -1).transpose(0, 1)

    def _of_slots(self, numbers: Tensor, places: Tensor) -> Tensor:
        """Positions or scores `[n, L, S, m]` at places `[L, n, S, m]`."""
        return numbers.gather(1, places.flatten(1)).view(places.shape).transpose(0, 1)

    # ---- one token at a time: the lowest block goes ---------------------------------------------------------------

    def choose(self, requests: Sequence[Request], blocks: Tensor) -> None:
        """Choose the next block to overwrite, for all sets of these requests that are full and whose block is used up.

        Args:
            requests: have seen as many tokens as before the next one.
            blocks: `[n, width]` their blocks.
        """
        rows = torch.tensor([request.row for request in requests], device=self.device)
        seen = torch.tensor([request.seen for request in requests], device=self.device)
        local = self._scores is not None
        fresh = [at for at, request in enumerate(requests) if not (request.scored and local)]
        known = [at for at, request in enumerate(requests) if request.scored and local]
        limits, full_at = self.limits[rows], self.full_at[rows]
        left = full_at - seen[:, None, None]
        newest = torch.where(left >= 0, (limits - left - 1) // self.block_size, self.victims[rows])
        newest = newest.expand(-1, self.layers, self.sets)
        if known:
            self._score_newest([requests[at] for at in known], blocks[known], newest[known], seen[known])
        width = max(int(request.sets.limits.max()) for request in requests)
        slots = torch.arange(width, device=self.device)[None, None, None]
        places = self.per_layer(self.flat(rows, blocks, slots))
        held = limits - left.clamp_min(0)
        used = (slots < held[..., None]).expand(-1, self.layers, self.sets, -1)
        positions = self._of_slots(self.positions, places).masked_fill(~used, -1)
        if local:
            scores = None
            if fresh:
                self._score_fresh(fresh, requests, rows, blocks, seen, positions, places)
            assert self._scores is not None  # noqa: S101  (for mypy: `local`)
            scores = self._of_slots(self._scores, places)
        else:
            scores = self._score_held(fresh, requests, rows, blocks, seen, positions)
        lowest = self._lowest(rows, seen, positions, scores.masked_fill(~used, torch.nan), newest, limits)
        due = (left <= 0) & (left % self.block_size == 0)
        self.victims[rows] = torch.where(due, lowest, self.victims[rows])
        for request in requests:
            request.scored = True

    def _lowest(
        self, rows: Tensor, seen: Tensor, positions: Tensor, scores: Tensor, newest: Tensor, limits: Tensor
    ) -> Tensor:
        """`[n, L, S]`, the block with the lowest mean score that is not protected."""
        size = self.block_size
        by_block = positions.unflatten(-1, (-1, size))
        blocks = torch.arange(by_block.shape[-2], device=self.device)
        inside_set = blocks < (limits // size)[..., None]
        protected = inside(self.bounds[rows], by_block).any(-1)
        means = scores.unflatten(-1, (-1, size)).mean(-1).masked_fill(~inside_set, torch.nan)
        keys = rank_keys(
            means.flatten(1, 2), by_block[..., 0].flatten(1, 2), ~means.isnan().flatten(1, 2), self.needs.absolute_noise
        ).view(means.shape)
        safe = protected | (blocks == newest[..., None]) | ~inside_set
        safe |= by_block[..., -1] >= (seen - self.recent[rows])[:, None, None, None]
        return keys.masked_fill(safe, KEEP).argmin(-1)

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _budget(self, requests: Sequence[Request], rows: Tensor, layer: int) -> int | Tensor:
        """Tokens that the sets of a layer may hold, as policies are told."""
        if self.settings.unequal or len({request.sizes.capacity for request in requests}) > 1:
            return self.limits[rows][:, layer if self.settings.unequal else 0][..., None]
        return requests[0].sizes.capacity

    def states(self, layer: int, rows: Tensor, blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[n, KV heads, width, D]` in the first `width` slots of the sets of a layer."""
        at = torch.arange(-(-width // self.slots), device=self.device)[None, None, None]
        pages = self.page(rows, blocks, at)
        pages = pages[:, layer if pages.shape[1] > 1 else 0]  # [n, S, m]
        keys, values = self.pages[layer].read(pages)  # [n, S, m, G, N, D]
        keys, values = (part.transpose(2, 3).flatten(3, 4).flatten(1, 2) for part in (keys, values))
        return keys[:, :, :width], values[:, :, :width]

    def _groups(self, fresh: Sequence[int]) -> list[list[int]]:
        """Requests that are scored together; statistics are kept of each alone."""
        return [[at] for at in fresh] if self.needs.queries else [list(fresh)]

    def _scored(
        self, requests: Sequence[Request], rows: Tensor, blocks: Tensor, seen: Tensor, positions: Tensor
    ) -> Tensor:
        """Scores `[n, L, S, m]` of all tokens of some requests."""
        scores = []
        for layer, scorer in enumerate(self.scorers):
            width = int(max(request.held_in(layer, request.seen).max() for request in requests))
            at = positions[:, layer, :, :width]
            keys, values = self.states(layer, rows, blocks, width)
            observed = self.observers.statistics(requests[0].row, layer, at)
            found = scorer(keys, values, at, seen, *observed, self._budget(requests, rows, layer))
            scores.append(torch.nn.functional.pad(found, (0, positions.shape[-1] - width), value=torch.nan))
        return torch.stack(scores, dim=1)

    def _score_held(
        self,
        fresh: Sequence[int],
        requests: Sequence[Request],
        rows: Tensor,
        blocks: Tensor,
        seen: Tensor,
        positions: Tensor,
    ) -> Tensor:
        parts = [
            self._scored([requests[at] for at in group], rows[group], blocks[group], seen[group], positions[group])
            for group in self._groups(fresh)
        ]
        return torch.cat(parts)

    def _score_fresh(
        self,
        fresh: list[int],
        requests: Sequence[Request],
        rows: Tensor,
        blocks: Tensor,
        seen: Tensor,
        positions: Tensor,
        places: Tensor,
    ) -> None:
        """Score all tokens of requests that have just become full, once."""
        chosen = [requests[at] for at in fresh]
        scores = self._scored(chosen, rows[fresh], blocks[fresh], seen[fresh], positions[fresh])
        self.note_scores(places[:, fresh], scores.transpose(0, 1), positions[fresh].transpose(0, 1) >= 0)

    def note_scores(self, places: Tensor, scores: Tensor, used: Tensor) -> None:
        """Store scores `[L, ...]` at places `[L, ...]` where `used`."""
        if self._scores is None:
            return
        flat, layers = places.flatten(1), torch.arange(len(places), device=self.device)[:, None]
        layers, chosen = layers.expand_as(flat)[used.flatten(1)], flat[used.flatten(1)]
        self._scores[layers, chosen] = scores.flatten(1)[used.flatten(1)]

    def _score_newest(self, requests: Sequence[Request], blocks: Tensor, newest: Tensor, seen: Tensor) -> None:
        """Score the newest block of each set; the scores of the other blocks are known."""
        rows = torch.tensor([request.row for request in requests], device=self.device)
        slots = newest[..., None] * self.block_size + torch.arange(self.block_size, device=self.device)
        places = self.per_layer(self.flat(rows, blocks, slots))  # [L, n, S, P]
        positions = self._of_slots(self.positions, places).transpose(0, 1)
        parts = [self.pages[layer].read_slots(places[layer].flatten()) for layer in range(self.layers)]
        keys, values = (
            # [L, n * S * P, G, D] -> [L, n, H, P, D]
            torch.stack(part).view(*places.shape, *part[0].shape[1:]).transpose(3, 4).flatten(2, 3)
            for part in zip(*parts, strict=True)
        )
        if self.needs.by_layer or self.settings.unequal or len({one.sizes.capacity for one in requests}) > 1:
            scores = torch.stack(
                [
                    scorer(
                        keys[layer],
                        values[layer],
                        positions[layer],
                        seen,
                        budget=self._budget(requests, rows, layer),
                    )
                    for layer, scorer in enumerate(self.scorers)
                ]
            )
        else:
            scores = self.scorers[0](
                keys.flatten(0, 1), values.flatten(0, 1), positions.flatten(0, 1), seen.repeat(self.layers)
            ).view(places.shape)
        self.note_scores(places, scores, positions >= 0)

    # ---- several tokens: the best stay ----------------------------------------------------------------------------

    def best(self, request: Request, layer: int, sets: Sets, tokens: Watched) -> "Kept":
        """Choose the best of the tokens of a forward and of those held before it.

        Args:
            request: all its tokens are counted as seen.
            sets: after the choice.
            tokens: the tokens of this layer.
        """
        row = torch.tensor([request.row], device=self.device)
        seen = torch.tensor([request.seen], device=self.device)
        own = layer if len(sets.limits) > 1 else 0
        limits = torch.from_numpy(sets.limits[own]).to(self.device).expand(self.sets)[None]
        held = torch.from_numpy(sets.held(request.seen)[own]).to(self.device).expand(self.sets)[:, None]
        most = int(sets.limits[own].max())
        budget = limits[..., None] if self.settings.unequal else request.sizes.capacity
        positions = tokens.positions
        scores = self.scorers[layer](tokens.keys, tokens.values, positions, seen, *tokens.observed, budget)
        ranks = rank_keys(scores, positions, positions >= 0, self.needs.absolute_noise)
        safe = inside(self.bounds[row], positions) | (positions > request.seen - 1 - request.sizes.recent)
        ranks = ranks.masked_fill(safe & (positions >= 0), KEEP)
        kept, at = best_within(ranks, positions, limits, most)
        # Where fewer are held than there are slots, places without a token come first: turn them to the end.
        places = torch.arange(most, device=self.device)
        order = (places + limits[0, :, None] - held).clamp_max(most - 1)
        used = places < held
        kept = kept[0].gather(-1, order)
        at = at[0].gather(-1, order).masked_fill(~used, -1)
        self.observers.settle(request.row, layer, kept[None])
        return Kept(kept, at, scores[0].gather(-1, kept), used)

    def put(self, request: Request, layer: int, blocks: Tensor, tokens: Watched, kept: "Kept") -> None:
        """Write the tokens that stay to the pages of the sets of a layer.

        Args:
            blocks: `[1, width]` blocks of the request.
        """
        row = torch.tensor([request.row], device=self.device)
        slots = torch.arange(kept.indices.shape[-1], device=self.device)[None, None, None]
        places = self.flat(row, blocks, slots)
        places = places[0, layer if places.shape[1] > 1 else 0]  # [S, most]
        chosen = kept.indices + self._set_numbers[:, None] * tokens.keys.shape[2]
        where, at = places[kept.used], chosen[kept.used]
        states = (
            part[0].unflatten(0, (self.sets, -1)).transpose(1, 2).flatten(0, 1)[at]
            for part in (tokens.keys, tokens.values)
        )
        keys, values = states
        self.pages[layer].write(keys, values, where)
        self.positions[layer, where] = kept.positions[kept.used]
        if self._scores is not None:
            self._scores[layer, where] = kept.scores[kept.used]


class Kept:
    """The tokens that stay in the sets of a layer.

    Attributes:
        indices: `[S, most]` among the tokens that were there.
        positions: `[S, most]`.
        scores: `[S, most]`.
        used: `[S, most]` bool, False behind the last token of a set.
    """

    def __init__(self, indices: Tensor, positions: Tensor, scores: Tensor, used: Tensor) -> None:
        self.indices, self.positions, self.scores, self.used = indices, positions, scores, used


def spread(numbers: Any, device: torch.device) -> Tensor:
    """Integers of the host, on a device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
