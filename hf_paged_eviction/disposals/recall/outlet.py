"""What recall keeps of one layer, and how blocks come back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...parts import Snapshot, map_tensors
from ...queries.parts import Part
from ...store.host import HostBlocks
from ...store.store import HeldSnapshot
from ...table.ranking import DROP, KEEP, rank_keys
from ...table.table import BlockTable, TableSnapshot
from ..base import Asked, Held, Outlet, Site
from ..replacement import Replacement, Resident, make_replacement
from ..replacement.base import order
from .frames import Frames
from .look import look
from .saved import RecallSnapshot
from .stage import Places, Stage
from .summaries import Kind, Summaries
from .swap import Swap


class Settings(Protocol):
    """The parameters of `Recall`."""

    @property
    def blocks(self) -> int | str: ...

    @property
    def every(self) -> int: ...

    @property
    def summary(self) -> Kind: ...

    @property
    def round(self) -> int: ...

    @property
    def prefetch(self) -> int: ...

    @property
    def length(self) -> int | None: ...

    @property
    def replacement(self) -> str | Replacement: ...

    @property
    def keep(self) -> float: ...


@dataclass(frozen=True)
class _Rows:
    """What belongs to rows, on the layer's device.

    Attributes:
        stored: `[B]` int64, blocks in host memory.
        resident: of the blocks in the slots, when and how often they were asked for; None where nothing was so far.
        due: `[B]` int64, tokens seen from which on blocks are chosen anew.
    """

    stored: Tensor
    resident: Resident | None
    due: Tensor


@dataclass(frozen=True)
class _Choice:
    """What a query asked for.

    Attributes:
        chosen: `[B, S, N]` bool, the blocks that it needs.
        likely: `[B, S, N]` bool, those among twice as many.
        ids: `[B, S, K]` int64, the former in order, the best first.
        next: `[B, S, n]` int64, those after them, which the next query may ask for; -1 where there are none.
    """

    chosen: Tensor
    likely: Tensor
    ids: Tensor
    next: Tensor


class RecallOutlet(Outlet):
    """Copies every block that is full to host memory, and brings back those that queries ask for.

    Nothing is copied while all tokens fit the budget. From then on host memory has every full block, also those that
    are in the slots: a block in the slots may be overwritten at any time.

    Attributes:
        replacement: says which block makes room.
        leader: the outlet of an earlier layer whose choice this one uses; None = it has its own.
        stage: blocks that were fetched ahead.

    Args:
        settings: parameters.
        site: the layer.
    """

    plans = reads = ranks = True

    def __init__(self, settings: Settings, site: Site) -> None:
        self.settings, self.site = settings, site
        self.replacement = make_replacement(settings.replacement)
        self.leader: RecallOutlet | None = None
        self.clear()

    def clear(self) -> None:
        """See `Outlet.clear`."""
        self.host: HostBlocks | None = None
        self.summaries: Summaries | None = None
        self._rows: _Rows | None = None
        self._looked: Tensor | None = None  # [B, S, n] bool, which of the prompt's blocks may come back; None = all
        self._said: _Choice | None = None
        self._resting = 0  # steps that are known to need no choice
        self._faults = 0
        self.stage = Stage()

    @property
    def device_bytes(self) -> int:
        return self.stage.bytes + (0 if self.summaries is None else self.summaries.bytes)

    @property
    def faults(self) -> int:
        return self._faults

    @property
    def host_bytes(self) -> int:
        return 0 if self.host is None else self.host.bytes

    def most_bytes(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """See `Outlet.most_bytes`: summaries of the longest text, blocks that are fetched ahead; and one round."""
        settings, size = self.settings, self.site.sizes.block_size
        token = _token_bytes(keys) + _token_bytes(values)
        vectors = 0 if self.leader is not None else 1 if settings.summary == "vector" else 2
        summaries = vectors * self._most_blocks * _token_bytes(keys)
        at_once = settings.round if settings.blocks == "all" else max(settings.round, int(settings.blocks))
        return summaries + settings.prefetch * size * token, at_once * size * token

    @property
    def _most_blocks(self) -> int:
        """Of a text that is not refused; 0 = any number."""
        return -(-(self.settings.length or 0) // self.site.sizes.block_size)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Outlet.map_rows`."""
        if self.host is None or self.summaries is None or self._rows is None:
            return
        rows = change(torch.arange(len(self._rows.stored), device=self._rows.stored.device))
        self.host.select(rows)
        self.summaries.select(rows)
        self._rows = map_tensors(change, self._rows)
        self._looked = None if self._looked is None else change(self._looked)
        self.stage.empty()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> RecallSnapshot | None:
        """See `Outlet.snapshot`. What was fetched ahead is left out: it is in host memory, too."""
        host, summaries, rows = self.host, self.summaries, self._rows
        if host is None or summaries is None or rows is None:
            return None
        blocks = int(rows.stored.max())
        return RecallSnapshot(
            host.first(blocks),
            *summaries.first(blocks),
            rows.stored,
            rows.due,
            rows.resident,
            self._looked,
            self._resting,
            self._faults,
        )

    def check_saved(self, saved: Snapshot | None, table: TableSnapshot, store: HeldSnapshot) -> None:
        """See `Outlet.check_saved`."""
        if isinstance(saved, RecallSnapshot):
            vectors = 0 if self.leader is not None else 1 if self.settings.summary == "vector" else 2
            saved.check(table, store, self.site.sizes.block_size, vectors, self.settings.every)
        elif bool((table.counters.seen - table.state.phase.pads > table.state.tokens.positions.shape[-1]).any()):
            raise ValueError("recall: tokens have left, and nothing is in host memory")

    def restore(self, saved: Snapshot, device: torch.device) -> None:
        """See `Outlet.restore`."""
        if not isinstance(saved, RecallSnapshot):
            raise ValueError("what recall knows is not in it")
        keys, values = self.site.store.tensors
        self.host = HostBlocks(keys, values, self.site.sizes.block_size)
        self.host.fill(saved.states)
        self.summaries = Summaries(self.settings.summary, keys)
        self.summaries.fill(saved.high.to(device), saved.low.to(device))
        stored, resident, due, looked = map_tensors(
            lambda states: states.to(device), [saved.stored, saved.resident, saved.due, saved.looked]
        )
        self._rows, self._looked = _Rows(stored, resident, due), looked
        self._resting, self._faults = saved.resting, saved.faults

    # ---- to host memory -------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """A block is full: copy it."""
        self._save(held)

    def overflow(self, tokens: Held, leaves: Tensor) -> Held:
        """Copy all blocks that are full. They are put to other slots, so nothing is known of when they were needed."""
        rows = self._save(tokens)
        self._rows = _Rows(rows.stored, None, torch.zeros_like(rows.due))
        self._resting = 0
        return tokens

    def _save(self, held: Held) -> _Rows:
        """Copy the tokens of blocks that are not in host memory yet, and sum those blocks up."""
        host, summaries, rows = self._ready(held)
        size = host.block_size
        now = (held.positions.amax((1, 2)) + 1) // size
        host.reserve(self._allowed(int(now.max())))
        first, end = (blocks[:, None, None] * size for blocks in (rows.stored, now))
        missing = (held.positions >= first) & (held.positions < end)
        heads = held.keys.shape[1]
        row, head, at = missing.expand(-1, heads, -1).nonzero(as_tuple=True)
        position = held.positions.expand(-1, heads, -1)[row, head, at]
        keys, values = held.keys[row, head, at], held.values[row, head, at]
        host.write(row, head, position, keys, values)
        if self.leader is None:
            summaries.reserve(int(now.max()), self._most_blocks)
            count = now - rows.stored
            # Of each row's new blocks, the place among those of all rows.
            place = (count.cumsum(0) - count - rows.stored)[row] + position // size
            blocks = keys.new_empty(int(count.sum()), heads, size, keys.shape[-1])
            blocks[place, head, position % size] = keys
            number = torch.arange(host.blocks, device=now.device)
            new = (number >= rows.stored[:, None]) & (number < now[:, None])
            new_row, new_block = new.nonzero(as_tuple=True)
            summaries.put(new_row, new_block, blocks)
        self._rows = _Rows(now, rows.resident, rows.due)
        return self._rows

    def _allowed(self, blocks: int) -> int:
        length = self.settings.length
        if length is not None and blocks > self._most_blocks:
            raise ValueError(
                f"recall(length={length}): a text of more tokens came. Begin anew with a larger length: this "
                "cache cannot be used any more."
            )
        return blocks

    def _ready(self, held: Held) -> tuple[HostBlocks, Summaries, _Rows]:
        size = self.site.sizes.block_size
        if self.host is None or self.summaries is None or self._rows is None:
            self.host = HostBlocks(held.keys, held.values, size)
            self.summaries = Summaries(self.settings.summary, held.keys)
            none = torch.zeros(len(held.positions), dtype=torch.int64, device=held.positions.device)
            self._rows = _Rows(none, None, none)
        return self.host, self.summaries, self._rows

    # ---- which block makes room -----------------------------------------------------------------------------------

    def frame_ranks(self, table: BlockTable) -> Tensor:
        """As the replacement says; the oldest block goes first where nothing was asked for so far."""
        frames = Frames.of(table)
        resident = None if self._rows is None else self._rows.resident
        if resident is None:
            return frames.ids.float()
        return order(self.replacement.ranks(resident, frames.ids, frames.count), frames.ids).float()

    # ---- back from host memory ------------------------------------------------------------------------------------

    def beside(self, asked: Asked) -> Iterable[Part] | None:
        """A single query brings back what it needs; several attend to everything, as does one of blocks="all"."""
        if self.settings.keep < 1 and asked.waiting and asked.table.seen == 0:
            self._looked = look(asked, self.site, self.settings.keep)
        if self.host is None or self.summaries is None or self._rows is None:
            return None
        if asked.queries.query.shape[2] > 1 or self.settings.blocks == "all":
            return self._rounds(asked, self.host, self._rows)
        if self._resting and asked.real is None:
            self._resting -= 1
        else:
            self._recall(asked, self.host, self.summaries, self._rows)
        return None

    def _recall(self, asked: Asked, host: HostBlocks, summaries: Summaries, rows: _Rows) -> None:
        table = asked.table
        frames = Frames.of(table)
        due = frames.away & (frames.count >= rows.due)
        if asked.real is not None:
            due = due & asked.real[:, 0]
        choice = self._said = self._choose(asked, summaries, frames, rows, due)
        chosen, likely, ids = choice.chosen, choice.likely, choice.ids
        present = torch.zeros_like(chosen).scatter(-1, frames.ids.clamp_min(0), frames.ids >= 0)
        present[..., 0] |= (frames.ids == 0).any(-1)
        in_slots = frames.ids >= 0
        wanted = in_slots & chosen.gather(-1, frames.ids.clamp_min(0))
        resident = rows.resident or Resident.empty(frames.ids)
        resident = resident.hit(wanted, frames.count).began(frames.newest & frames.away[:, None, None], frames.count)
        unlikely = in_slots & ~likely.gather(-1, frames.ids.clamp_min(0))
        resident = replace(resident, unlikely=torch.where(due[:, None, None], unlikely, resident.unlikely))
        missing = chosen.gather(-1, ids) & ~present.gather(-1, ids)
        again = missing & (ids == frames.leaving[..., None])
        here = present.gather(-1, choice.next.clamp_min(0))
        flags, come, soon = _on_host(
            torch.stack([due.all(), due.any(), again.any()]),
            ids.masked_fill(~missing, -1),
            choice.next.masked_fill(here, -1),
        )
        heads = asked.queries.key.shape[1]
        places = Places.of(come, heads)
        if len(places):
            free = in_slots & ~wanted & ~frames.pinned(self.site.sizes)
            going = order(self.replacement.ranks(resident, frames.ids, frames.count), frames.ids)
            going = going.masked_fill(~free, KEEP).argsort(dim=-1)
            resident = self.replacement.after(resident, free, missing.sum(-1), frames.count)
            first = (~missing).long().argsort(dim=-1, stable=True)
            coming, make_room = missing.gather(-1, first), going[..., : ids.shape[-1]]
            swap = Swap(ids.gather(-1, first), make_room, coming, len(places), bool(flags[2]))
            fetched = host.parts(self.stage.take(host, places))
            swap.carry_out(table, frames, self._storages(asked), fetched)
            self._faults += len(places)
            resident = resident.came(make_room, coming, frames.count)
        if self.settings.prefetch and bool(flags[1]):
            self.stage.fill(host, Places.of(soon, heads))
        every = self.settings.every
        self._rows = _Rows(rows.stored, resident, torch.where(due, frames.count + every, rows.due))
        self._resting = every - 1 if bool(flags[0]) else 0

    def _choose(self, asked: Asked, summaries: Summaries, frames: Frames, rows: _Rows, due: Tensor) -> "_Choice":
        """Which blocks the query needs."""
        if self.leader is not None:
            return self.leader.said(frames.ids)
        sizes, scores = self.site.sizes, summaries.scores(asked.queries.query)
        if self.site.heads == "shared":
            scores = self.site.share.gather(scores).mean(1, keepdim=True)
        blocks = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        recent = (frames.count // sizes.block_size - sizes.recent_blocks)[:, None, None]
        there = (blocks < rows.stored[:, None, None]) & (blocks < recent) & (blocks >= sizes.protected_blocks)
        if self._looked is not None:
            known = self._looked.shape[-1]
            later = there.shape[-1] - known
            there = there & torch.nn.functional.pad(self._looked, (0, later), value=True)[..., : there.shape[-1]]
        keys = rank_keys(scores, blocks, there & due[:, None, None], absolute_noise=True)
        count, ahead = int(self.settings.blocks), self.settings.prefetch
        best, ids = keys.topk(min(count + max(count, ahead), keys.shape[-1]), dim=-1)
        needed, likely = (
            torch.zeros_like(there).scatter(-1, ids[..., :most], best[..., :most] > DROP) for most in (count, 2 * count)
        )
        after = slice(count, count + ahead)
        return _Choice(needed, likely, ids[..., :count], ids[..., after].masked_fill(best[..., after] == DROP, -1))

    def said(self, ids: Tensor) -> "_Choice":
        """What this step's query asked for, for a layer that follows and has these blocks `[B, S, F]`.

        Raises:
            RuntimeError: the layers do not fit together.
        """
        said = self._said
        if said is None or said.ids.shape[:2] != ids.shape[:2]:
            raise RuntimeError(
                "recall(layers=...): a layer cannot use the choice of the one before it, because they have different "
                "numbers of KV heads. Use layers=1 or heads='shared'."
            )
        return map_tensors(lambda states: states.to(ids.device), said)

    def _storages(self, asked: Asked) -> list[tuple[Tensor, Tensor]]:
        """All keys and values in which the slots have to change: the store's, and the copies that wait.

        Raises:
            RuntimeError: attention was given something else than the cache returned.
        """
        keys, values = self.site.store.tensors
        stored, given = (keys, values), (asked.queries.key, asked.values)
        if asked.waiting:
            return [stored, given]
        if any(theirs.data_ptr() != ours.data_ptr() for ours, theirs in zip(stored, given, strict=True)):
            raise RuntimeError(
                "recall changes keys and values in place, and this model changes them on the way from the cache to "
                "attention. Use disposal='drop'."
            )
        return [stored]

    def check_crop(self, count: int) -> None:
        """See `Outlet.check_crop`."""
        if self.host is not None:
            raise ValueError(
                f"Cannot take back {count} tokens: blocks have been moved to host memory since. Call "
                "`cache.activate_past_recording()` before the forward that may be taken back."
            )

    # ---- everything -----------------------------------------------------------------------------------------------

    def _rounds(self, asked: Asked, host: HostBlocks, rows: _Rows) -> Iterator[Part]:
        """All tokens that are not in the slots, a few blocks at a time."""
        positions, size = asked.table.positions, host.block_size
        stored = int(rows.stored.max())
        away = torch.arange(stored * size, device=positions.device) < rows.stored[:, None, None] * size
        away = away.expand(-1, positions.shape[1], -1)
        inside = (positions >= 0) & (positions < stored * size)
        here = torch.zeros_like(away, dtype=torch.int64)
        here = here.scatter_add(-1, positions.clamp(0, max(stored * size - 1, 0)), inside.long())
        away = away & (here == 0)
        for first in range(0, stored, self.settings.round):
            last = min(first + self.settings.round, stored)
            seen = away[..., first * size : last * size]
            if bool(seen.any()):
                yield Part(*host.span(first, last), torch.where(seen, 0.0, float("-inf"))[:, :, None])


def _token_bytes(states: Tensor) -> int:
    """What a token of all rows and heads takes, given states `[B, H, n, D]` of any number of tokens."""
    return states.shape[0] * states.shape[1] * states.shape[3] * states.element_size()


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Bool and int64 tensors in host memory, by one copy: the one moment of a step in which the host waits."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    packed = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
