"""What ended requests hold, for those that begin like them.

A *snapshot* is what a request held after the last whole block of its text. Its blocks stay where they are, as cached
blocks of vLLM's pool, until the pool needs them; a request that begins with the same text takes a copy.

Single tokens overwrite others. So what each has overwritten is saved in the block of new tokens, which is not used for
anything else meanwhile: slot `n` of block `b` of a request holds what its token `b * slots + n` has overwritten.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from hf_paged_eviction.internals import Layout, LiveRequest, RequestTable

from .owners import Holding

# ---- scheduler ---------------------------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """Blocks of a request that has ended.

    Attributes:
        blocks: those that it kept, and the one with what was overwritten since.
        keys: their names in the pool, which takes them away when it reuses a block.
        seen: number of tokens of its text.
        origin: id of the request.
    """

    blocks: list[Any]
    keys: list[Any]
    seen: int
    origin: str

    @classmethod
    def of(cls, blocks: list[Any], text: bytes, group: int, seen: int, origin: str, pool: Any) -> "Snapshot":
        """Make these blocks known to the pool by the hash of the text."""
        keys = [
            make_block_hash_with_group_id(text + b"evicted" + number.to_bytes(4, "big"), group)
            for number in range(len(blocks))
        ]
        for block, key in zip(blocks, keys, strict=True):
            pool._insert_block_hash(key, block, num_tokens=seen)
        return cls(blocks, keys, seen, origin)

    @property
    def is_whole(self) -> bool:
        """Whether the pool has reused none of its blocks."""
        return all(block.block_hash == key for block, key in zip(self.blocks, self.keys, strict=True))


_SNAPSHOTS: "weakref.WeakKeyDictionary[Any, dict[bytes, Snapshot]]" = weakref.WeakKeyDictionary()


def snapshots_of(pool: Any) -> dict[bytes, Snapshot]:
    """The snapshots of a pool, by the hash of their text."""
    known = _SNAPSHOTS.setdefault(pool, {})
    if len(known) > pool.num_gpu_blocks:  # each has a block at least
        for text in [text for text, snapshot in known.items() if not snapshot.is_whole]:
            del known[text]
    return known


class Beginnings:
    """How the latest requests began, by the hashes of their blocks; not more than `MOST` of these."""

    MOST = 1 << 14

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def note(self, hashes: Sequence[bytes]) -> None:
        """A request begins so."""
        for text in hashes:
            self._known.pop(text, None)
            self._known[text] = None
        while len(self._known) > self.MOST:
            del self._known[next(iter(self._known))]

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Number of the first blocks with which an earlier request began, too."""
        count = 0
        while count < len(hashes) and hashes[count] in self._known:
            count += 1
        return count


# ---- workers -----------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a worker knows of a request beside keys, values, positions and scores.

    Attributes:
        request: the request, with the tokens it has seen.
        answer: the list of its answer, which tells requests apart.
        holding: its blocks, as the workers were told.
        blocks: `[width]` its blocks.
        own: `[Q, W]`, see `GroupPages.own`; None if all sets are equal.
        block: `[Q]` the blocks that are overwritten.
        noted: what was noted for its snapshot; None = there are no snapshots.
    """

    request: LiveRequest
    answer: Any
    holding: Holding
    blocks: Tensor
    own: Tensor | None
    block: Tensor
    noted: "Noted | None"


@dataclass
class Noted:
    """A request at the last whole block of its text, and since then.

    Attributes:
        before: `[Q]` the blocks that were overwritten then.
        log: `[slots, Q]` int32, numbers of the tokens that were overwritten since.
        layout: its layout then.
        tail: number of tokens since that came together; their slots hold what did not stay.
    """

    before: Tensor
    log: Tensor
    layout: Layout
    tail: int


class Undo:
    """Notes what single tokens overwrite, and takes it back in a copy.

    Args:
        table: the bookkeeping of requests.
        pages: keys and values.
        kept: blocks that a request keeps; those behind them are free for what is overwritten.
    """

    def __init__(self, table: RequestTable, pages: Any, kept: int, rows: int) -> None:
        self.table, self.pages, self.kept = table, pages, kept
        self._begun: dict[int, tuple[Any, int]] = {}  # by row: layout at the last whole block, and tail
        sets = table.layers * table.sets
        self.before = torch.zeros(rows, sets, dtype=torch.int64, device=table.device)
        self.log = torch.zeros(rows, pages.slots, sets, dtype=torch.int32, device=table.device)

    def mark(self, entries: list[Any]) -> None:
        """These requests begin a block of their text."""
        rows = [entry.request.number for entry in entries]
        if rows:
            self.before[rows] = self.table.block[rows]
        for entry in entries:
            self._begun[entry.request.number] = entry.request.layout, entry.count if self.is_tail(entry) else 0

    def is_tail(self, entry: Any) -> bool:
        """Whether the tokens of a forward are few enough for what does not stay to be saved."""
        slots, seen = self.pages.slots, entry.seen
        begins = seen % slots == 0 and seen // slots >= self.kept and seen >= entry.request.capacity
        return bool(1 < entry.count < slots and begins and self.pages.own is None)

    def save_lost(self, entry: Any, layer: int, kept: Any) -> None:
        """Save held tokens of a layer that do not stay."""
        table, row = self.table, entry.request.number
        of_layer = table.of_layer(layer)
        held = entry.request.layout.held(entry.seen)[of_layer][0]
        lost = torch.ones(table.sets, held + entry.count, dtype=torch.bool, device=table.device)
        lost.scatter_(1, kept.indices, False)
        at = lost.nonzero()[:, 1].view(table.sets, -1)  # [S, tokens of the forward]
        rows = torch.tensor([row], device=table.device)
        old = self.pages.places(rows, at[None].clamp_max(held - 1), of_layer)[0]
        new = self.pages.places_in_block(rows, rows * 0 + entry.seen // self.pages.slots, rows * 0)[0, of_layer]
        new = new[:, None] + torch.arange(entry.count, device=table.device)
        self._move(old[at < held], new[at < held])

    def save(self, rows: Tensor, seen: Tensor, at: Tensor) -> None:
        """Save what single tokens will overwrite.

        Args:
            rows, seen: `[n]` rows, and tokens seen before.
            at: `[n, Q]` numbers of the tokens in their sets.
        """
        pages, slot = self.pages, seen % self.pages.slots
        self.log[rows, slot] = at.int()
        old = pages.places(rows, at[..., None])[..., 0]
        self._move(old.flatten(), pages.places_in_block(rows, seen // pages.slots, slot).flatten())

    def _move(self, old: Tensor, new: Tensor) -> None:
        table = self.table
        self.pages.memory.move(old, new)
        table.positions[new], table.scores[new] = table.positions[old], table.scores[old]

    def noted(self, request: LiveRequest) -> Noted:
        """What was noted of a request, before its row is used again."""
        row = request.number
        layout, tail = self._begun.get(row, (request.layout, 0))
        return Noted(self.before[row].clone(), self.log[row].clone(), layout, tail)

    def restore(self, row: int, noted: Noted) -> None:
        """The request has a row again."""
        self.before[row], self.log[row] = noted.before, noted.log
        self._begun[row] = noted.layout, noted.tail

    def take_back(self, request: LiveRequest, state: State, seen: int) -> None:
        """Make the state of a request, whose blocks are copied, what another one had after `seen` tokens.

        Raises:
            RuntimeError: it is not known any more.
        """
        table, pages, row, noted = self.table, self.pages, request.number, state.noted
        later = state.request.seen - seen
        if noted is None or not 0 <= later <= pages.slots:
            raise RuntimeError(
                f"paged_eviction: request {request.id} goes on after {seen} tokens, its source ended after "
                f"{state.request.seen}."
            )
        request.seen, request.scored = seen, state.request.scored
        if pages.own is not None and state.own is not None:
            pages.own[row, :, : state.own.shape[-1]] = state.own
        request.layout = layout = noted.layout if later else state.request.layout
        table.give_row(request)
        table.block[row] = noted.before if later else state.block
        at = torch.arange(self.kept, device=table.device)
        old, new = (pages.places_of_blocks(blocks[at]) for blocks in (state.blocks, pages.blocks[row]))
        table.positions[new], table.scores[new] = table.positions[old], table.scores[old]
        rows = torch.tensor([row], device=table.device)
        full_at = torch.tensor(state.request.layout.full_at, device=table.device)
        if not later:
            return
        saved = pages.places_of_blocks(state.blocks[seen // pages.slots][None])[0]
        for slot in reversed(range(noted.tail, later)):
            full = seen + slot >= full_at
            places = pages.places(rows, noted.log[slot].long()[None, :, None])[0, :, 0]
            self._move(saved[full, slot], places[full])
        if noted.tail:  # tokens that came together: those that stayed and those that did not, in their order
            limit = layout.limits[0]
            places = pages.places(rows, torch.arange(limit, device=table.device)[None, None])[0]  # [Q, limit]
            every = torch.cat([places, saved[:, : noted.tail]], dim=1)
            positions = table.positions[every]
            order = positions.masked_fill(positions >= seen, seen).argsort(dim=1, stable=True)[:, :limit]
            self._move(every.gather(1, order).flatten(), places.flatten())
