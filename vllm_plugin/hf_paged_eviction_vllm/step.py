"""The plan of one forward: made before the first layer, on host integers, for all layers and requests of a group.

Attention gets, of each request, the pages that it keeps and those of its new tokens, as one table; a single token is
written over its victim before attention, and of several tokens the best stay after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_paged_eviction.internals import Logits, Queries, Watched

from .request import Request
from .sets import Numbers, Sets, fit, pages_of
from .table import Kept, Table, spread


@dataclass(frozen=True)
class Entry:
    """The tokens of one request.

    Attributes:
        request: the request, which counts these tokens as seen.
        number: its index in the batch.
        first: index of its first token in the forward.
        count: number of tokens.
        before: its sets before the forward.
        after: its sets after the forward, if they have to choose their best tokens; None = all tokens fit, or one token
            overwrites another.
    """

    request: Request
    number: int
    first: int
    count: int
    before: Sets
    after: Sets | None

    @property
    def seen(self) -> int:
        """Tokens seen before this forward."""
        return self.request.seen - self.count

    @property
    def tokens(self) -> slice:
        """Indices in the forward."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Batch:
    """Which sequences attention reads, in one layer or in all.

    Attributes:
        table: `[sequences, width]` int32, pages.
        lengths: `[sequences]` int32, tokens with the new ones.
        longest: the largest of them.
    """

    table: Tensor
    lengths: Tensor
    longest: int


#: Limits of the sets of a request after so many tokens.
Limits = Callable[[Request, int], Numbers]


class Step:
    """One forward.

    Args:
        table: what lies where.
        blocks: `[requests, width]` int64, the blocks of each request.
        limits: see `Limits`.
        kept: blocks that a request keeps.
    """

    def __init__(self, table: Table, blocks: Tensor, limits: Limits, kept: int) -> None:
        self._table, self._blocks, self._limits, self._kept = table, blocks, limits, kept
        self.entries: list[Entry] = []
        self._count = 0
        self._slots = torch.empty(0, device="cpu")
        self._kept_queries: Tensor | None = None

    # ---- the host's part ------------------------------------------------------------------------------------------

    def add(self, request: Request, number: int, count: int) -> None:
        """Add the next `count` tokens of a request."""
        before, after, capacity = request.sets, None, request.capacity
        foreseen = self._table.settings.foreseen
        if count == 1 and foreseen is not None and request.seen == capacity and before.limits.size == 1:
            self._share_out(request, number, self._limits(request, foreseen * capacity))
            before = request.sets
        request.seen += count
        if count > 1 and request.seen > capacity:
            after = before.choosing(self._limits(request, request.seen), request.seen, count)
        self.entries.append(Entry(request, number, self._count, count, before, after))
        self._count += count

    def begin(self) -> None:
        """Choose victims for blocks that are used up, and the places of all tokens. Reads no tensor."""
        table, size = self._table, self._table.block_size
        due = [
            entry
            for entry in self.entries
            if entry.count == 1 and entry.seen >= entry.before.growing_until and entry.before.is_due(entry.seen, size)
        ]
        if due:
            for entry in due:
                entry.request.seen -= 1  # as before the token that is about to come
            numbers = spread([entry.number for entry in due], table.device)
            table.choose([entry.request for entry in due], self._blocks[numbers])
            for entry in due:
                entry.request.seen += 1
        self._slots = self._places()

    def _places(self) -> Tensor:
        """Where the new tokens go, `[L, tokens * S]`; their positions are stored."""
        table, counts = self._table, [entry.count for entry in self.entries]
        facts = [(entry.number, entry.request.row, entry.seen, entry.after is not None) for entry in self.entries]
        of_entry = spread(facts, table.device)
        of_token = of_entry.repeat_interleave(spread(counts, table.device), dim=0, output_size=self._count)
        numbers, rows, seen, choosing = of_token.unbind(-1)
        at = torch.arange(self._count, device=table.device)
        firsts = spread([entry.first for entry in self.entries], table.device)
        at = seen + at - firsts.repeat_interleave(spread(counts, table.device), output_size=self._count)
        limits, full_at = table.limits[rows], table.full_at[rows]  # [tokens, ., .]
        held = limits - (full_at - seen[:, None, None]).clamp_min(0)
        slots = held + (at - seen)[:, None, None]
        if any(entry.count == 1 and entry.seen >= entry.before.growing_until for entry in self.entries):
            size, past = table.block_size, at[:, None, None] - full_at
            over = table.victims[rows] * size + past % size
            slots = torch.where((past < 0) | (choosing[:, None, None] > 0), slots, over)
        blocks = self._blocks[numbers]
        if self.chooses:
            pages = self._pages(rows, blocks, slots[..., None] // table.slots, held, seen, choosing)
            places = pages * table.slots + slots[..., None] % table.slots
        else:
            places = table.flat(rows, blocks, slots[..., None])
        flat = table.per_layer(places).flatten(1).contiguous()  # kernels take no strides
        positions = at[:, None].expand(-1, table.sets).flatten()
        table.positions.scatter_(1, flat, positions.expand(table.layers, -1))
        return flat

    def _pages(self, rows: Tensor, blocks: Tensor, at: Tensor, held: Tensor, seen: Tensor, choosing: Tensor) -> Tensor:
        """The pages where sets have their `at`-th pages while they read: those they own, then those of new blocks.

        Args:
            rows, blocks, seen, choosing: `[n]`, blocks `[n, width]`.
            at: `[n, ., ., m]`.
            held: `[n, ., .]` tokens held before.
        """
        table = self._table
        own = -(-held // table.slots)[..., None]
        new = (seen // table.slots)[:, None, None, None].maximum(own) + at - own
        beyond = (at >= own) & (choosing > 0)[:, None, None, None]
        pages = table.page(rows, blocks, at)
        return torch.where(beyond, table.numbered(blocks, table.sets_numbers(new)).expand_as(pages), pages)

    def _share_out(self, request: Request, number: int, limits: Numbers) -> None:
        """Let the sets of a request that single tokens have filled keep their best tokens, within new limits."""
        table, blocks = self._table, self._blocks[number][None]
        after = request.sets.choosing(limits, request.seen, 0)
        chosen = []
        for layer in range(table.layers):
            keys, values, positions = self._held(request, layer, blocks, request.sets, request.seen)
            tokens = Watched(keys, values, positions, table.observers.statistics(request.row, layer, positions))
            chosen.append((tokens, table.best(request, layer, after, tokens)))
        table.give(request, after)
        for layer, (tokens, kept) in enumerate(chosen):
            self._own(request, layer, after)
            table.put(request, layer, blocks, tokens, kept)
        request.scored = True

    def _own(self, request: Request, layer: int, sets: Sets) -> None:
        """Give the sets of a layer the pages that their limits need."""
        own = self._table.own_pages
        if own is not None and sets.limits.size > 1:
            pages = pages_of(sets.limits[layer : layer + 1], self._kept, self._table.slots)[0]
            own[request.row, layer, :, : pages.shape[-1]] = torch.from_numpy(pages).to(own.device)

    # ---- what attention reads -------------------------------------------------------------------------------------

    @property
    def chooses(self) -> bool:
        """Whether some request reads a chunk beside the pages that it keeps, or longer than these."""
        return any(entry.after is not None for entry in self.entries)

    def batch(self) -> Batch:
        """What attention reads where all sets are equal: one sequence for each request, its pages are blocks."""
        lengths, own, new = [], [], []
        for entry in self.entries:
            held = int(entry.before.held(entry.seen)[0, 0])
            if entry.after is not None:
                lengths.append(held + entry.count)
            else:
                lengths.append(int(entry.before.held(entry.request.seen)[0, 0]))
            count = -(-held // self._table.slots)
            own.append(count if entry.after is not None else 1 << 30)
            new.append(max(entry.seen // self._table.slots, count) - count)
        longest = max(lengths)
        blocks = self._blocks
        if self.chooses:
            at = torch.arange(-(-longest // self._table.slots), device=blocks.device)[None]
            owned, skipped = spread(own, blocks.device)[:, None], spread(new, blocks.device)[:, None]
            blocks = blocks.gather(1, torch.where(at < owned, at, at + skipped).clamp_max(blocks.shape[1] - 1))
        return Batch(blocks.int(), spread(lengths, blocks.device).int(), longest)

    def batches(self) -> list[Batch]:
        """What attention reads in each layer where sets differ: a sequence for each request and set."""
        table, device = self._table, self._blocks.device
        held = np.stack([self._all_sets(entry.before.held(entry.seen)) for entry in self.entries])
        count = np.array([entry.count for entry in self.entries])[:, None, None]
        chooses = np.array([entry.after is not None for entry in self.entries])[:, None, None]
        later = np.stack([self._all_sets(entry.before.held(entry.request.seen)) for entry in self.entries])
        lengths = np.where(chooses, held + count, later)  # [n, L, S]
        rows = spread([entry.request.row for entry in self.entries], device)
        at = torch.arange(-(-int(lengths.max()) // table.slots), device=device)[None, None, None]
        seen = spread([entry.seen for entry in self.entries], device)
        pages = self._pages(rows, self._blocks, at, spread(held, device), seen, spread(chooses[:, 0, 0], device))
        pages = table.per_layer(pages).flatten(1, 2).int()  # [L, n * S, width]
        of_layers = spread(lengths, device).transpose(0, 1).flatten(1).int()
        longest = lengths.max(axis=(0, 2)).tolist()
        return [
            Batch(pages[layer, :, : -(-most // table.slots)].contiguous(), of_layers[layer], most)
            for layer, most in enumerate(longest)
        ]

    def _all_sets(self, numbers: Numbers) -> Numbers:
        return np.broadcast_to(numbers, (self._table.layers, self._table.sets))

    # ---- each layer -----------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens of a layer, `[tokens, KV heads, D]`, to their places."""
        table = self._table
        pages = table.pages[layer]
        states = (part[: self._count].reshape(self._count * table.sets, -1, part.shape[-1]) for part in (keys, values))
        new_keys, new_values = states
        pages.write(new_keys, new_values, self._slots[layer])

    def after(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> None:
        """Observe the queries of a layer, and evict, after attention.

        Args:
            query: `[tokens, query heads, D]`.
            keys, values: `[tokens, KV heads, D]`.
        """
        observes = self._table.observers.any
        if observes:
            self._observe_singles(layer, query, keys, logits)
        for entry in self.entries:
            if entry.count > 1 and (observes or entry.after is not None):
                self._several(entry, layer, query, keys, values, logits)
        if layer == self._table.layers - 1:
            self._end()

    def _observe_singles(self, layer: int, query: Tensor, keys: Tensor, logits: Logits) -> None:
        table, size = self._table, self._table.block_size
        query = query.clone()  # vLLM may write over it
        for entry in self.entries:
            if entry.count > 1:
                continue
            request = entry.request
            own = query[entry.tokens].transpose(0, 1)[None], keys[entry.tokens].transpose(0, 1)[None]
            table.observers.see_one(request.row, layer, Queries(*own, logits))
            if request.sets.is_due(request.seen, size):
                blocks = self._blocks[entry.number][None]
                held, _, positions = self._held(request, layer, blocks, request.sets, request.seen)
                in_step = request.sets.in_step(size)
                table.observers.block_filled(request.row, layer, held, positions, request.seen, in_step)

    def _held(
        self, request: Request, layer: int, blocks: Tensor, sets: Sets, seen: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[1, KV heads, n, D]` that a request holds in a layer, and their positions `[1, S, n]`."""
        table = self._table
        held = self._all_sets(sets.held(seen))[layer]
        width = int(held.max())
        row = torch.tensor([request.row], device=blocks.device)
        keys, values = table.states(layer, row, blocks, width)
        slots = torch.arange(width, device=blocks.device)
        places = table.flat(row, blocks, slots[None, None, None])
        places = places[0, layer if places.shape[1] > 1 else 0]
        positions = table.positions[layer, places].masked_fill(slots >= spread(held, blocks.device)[:, None], -1)
        return keys, values, positions[None]

    def _several(self, entry: Entry, layer: int, query: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> None:
        """A request that brings several tokens."""
        table, request, blocks = self._table, entry.request, self._blocks[entry.number][None]
        new_keys, new_values = (part[entry.tokens].transpose(0, 1)[None] for part in (keys, values))
        positions = torch.arange(entry.seen, request.seen, device=blocks.device).expand(1, table.sets, -1)
        held = 0
        if entry.seen:
            old_keys, old_values, before = self._held(request, layer, blocks, entry.before, entry.seen)
            new_keys, new_values = torch.cat([old_keys, new_keys], 2), torch.cat([old_values, new_values], 2)
            positions, held = torch.cat([before, positions], -1), before.shape[-1]
        queries = Queries(query[entry.tokens].transpose(0, 1)[None], new_keys, logits)
        observed = table.observers.see_several(request.row, layer, queries, positions, held)
        if entry.after is None:
            table.observers.settle(request.row, layer, None)
            return
        tokens = Watched(new_keys, new_values, positions, observed)
        kept: Kept = table.best(request, layer, entry.after, tokens)
        self._own(request, layer, entry.after)
        table.put(request, layer, blocks, tokens, kept)

    def _end(self) -> None:
        """Finish the forward, after all layers."""
        for entry in self.entries:
            if entry.after is not None:
                self._table.give(entry.request, entry.after)
                entry.request.scored = True


def limits_of(shares: Sequence[Any], sets: int, first_head: int, blocks: int, slots: int) -> Numbers:
    """The limits `[L, S]` of the sets of a group.

    Args:
        shares: tokens `[1 or KV heads of the model]` of each of its layers.
        sets: sets of a layer.
        first_head: index of the first KV head that this process holds.
        blocks: blocks that a request keeps.
        slots: tokens of a block.
    """
    rows = [share.expand(sets) if len(share) == 1 else share[first_head : first_head + sets] for share in shares]
    return fit(np.stack([row.numpy() for row in rows]).astype(np.int64), blocks, slots)
