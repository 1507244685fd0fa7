"""Recall in one layer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.parts import Part
from ...ranking import KEEP
from ...store.arriving import StateKind
from ...table.budget import BlockBudget
from ...table.table import BlockTable
from ...tensors.parts import map_tensors
from ...tensors.saved import LONGEST, SavedState, StateDict
from ..base import AttentionCall, EvictionAction, Held, Site
from .archive import ROUND, Archive
from .blocks import best_blocks, protected_blocks, rank_whole_blocks, scores_in_slots
from .choice import Choice
from .frames import Frames, order
from .look import look
from .saved import load_stored, load_wanted
from .settings import Settings
from .stage import Places, Stage
from .swap import Swap


@dataclass(frozen=True)
class _BlockRequests:
    """The blocks that queries have needed so far, on the layer's device, with rows in dimension 0.

    Attributes:
        wanted_at: `[B, S, F]` int64, when a query last needed the block in each frame, counted in tokens seen; None =
            no query so far.
        due: `[B]` int64, tokens seen from which on blocks are chosen anew.
    """

    wanted_at: Tensor | None
    due: Tensor


class RecallAction(EvictionAction):
    """Copies every full block to host memory, and brings back the blocks that queries need.

    Nothing is copied while all tokens fit the budget. After that, host memory holds every full block, also those in the
    slots, because a block in the slots may be overwritten at any time.

    Attributes:
        leader: the action of an earlier layer whose choice this one uses; None = this one chooses itself.
        archive: all full blocks; None while all tokens fit the budget.
        stage: prefetched blocks.

    Args:
        settings: parameters of `Recall`.
        site: the layer.
    """

    plans = reads = picks_blocks = True

    def __init__(self, settings: Settings, site: Site) -> None:
        self.settings, self.site = settings, site
        self.leader: RecallAction | None = None
        self.clear()

    def clear(self) -> None:
        """See `EvictionAction.clear`."""
        self.archive: Archive | None = None
        self._past: _BlockRequests | None = None
        self._looked: Tensor | None = None  # [B, S, n] bool, which of the prompt's blocks may come back; None = all
        self._choice: Choice | None = None
        self._resting = 0  # steps that are known to need no choice
        self._faults = 0
        self.stage = Stage()

    @property
    def device_bytes(self) -> int:
        return self.stage.bytes + (0 if self.archive is None else self.archive.summaries.bytes)

    @property
    def faults(self) -> int:
        return self._faults

    @property
    def host_bytes(self) -> int:
        return 0 if self.archive is None else self.archive.host.bytes

    def most_bytes(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """See `EvictionAction.most_bytes`: summaries of the longest text and prefetched blocks; and one round."""
        settings, size = self.settings, self.site.sizes.block_size
        token = _token_bytes(keys) + _token_bytes(values)
        vectors = 0 if self.leader is not None else 1 if settings.summary == "vector" else 2
        summaries = vectors * (settings.most_blocks(size) or 0) * _token_bytes(keys)
        at_once = ROUND if settings.blocks == "all" else max(ROUND, int(settings.blocks))
        return summaries + settings.prefetch * size * token, at_once * size * token

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `EvictionAction.map_rows`."""
        if self.archive is None or self._past is None:
            return
        self.archive.select(change(torch.arange(len(self._past.due), device=self._past.due.device)))
        self._past = map_tensors(change, self._past)
        self._looked = None if self._looked is None else change(self._looked)
        self.stage.empty()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict | None:
        """See `EvictionAction.state_dict`. Prefetched blocks are left out, because host memory has them, too."""
        archive, past = self.archive, self._past
        if archive is None or past is None:
            return None
        blocks = int(archive.stored.max())
        high, low = archive.summaries.first(blocks)
        return {
            "states": archive.host.first(blocks),
            "high": high,
            "low": low,
            "stored": archive.stored,
            "resting": self._resting,
            "faults": self._faults,
            "looked": self._looked,
            "due": past.due,
            "wanted_at": past.wanted_at,
        }

    def load_state(self, saved: SavedState | None, table: BlockTable, kind: StateKind) -> None:
        """See `EvictionAction.load_state`."""
        if saved is None:
            if bool((table.seen - table.pads > table.capacity).any()):
                raise ValueError("recall: tokens were evicted, but nothing is in host memory")
            return
        rows, heads, size = table.rows, kind.heads, self.site.sizes.block_size
        width = kind.key_width + kind.value_width
        states = saved.checked("states", (rows, heads, None, size, width), kind.dtype)
        vectors = 0 if self.leader is not None else 1 if self.settings.summary == "vector" else 2
        high, low = (
            saved.tensor(name, (rows, heads, states.shape[2] if vectors > at else 0, kind.key_width), kind.dtype)
            for at, name in enumerate(("high", "low"))
        )
        stored = load_stored(saved, table, states.shape[2])
        self.archive = Archive(self.settings, size, self.site.store, self.leader is None)
        self.archive.fill(states, high, low, stored)
        wanted_at = load_wanted(saved, table) if saved.has("wanted_at") else None
        self._past = _BlockRequests(wanted_at, saved.like("due", table.pads, 0, LONGEST))
        if saved.has("looked"):
            self._looked = saved.tensor("looked", (*table.phase.full_at.shape, None), torch.bool)
        self._resting = saved.number("resting", 0, self.settings.every - 1)
        self._faults = saved.number("faults", 0, LONGEST)

    # ---- to host memory -------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """Copy the block that has just been filled."""
        self._archived(held)

    def overflow(self, tokens: Held, leaves: Tensor) -> Held:
        """Copy all full blocks. They move to other slots, so the record of when they were needed is dropped."""
        _, past = self._archived(tokens)
        self._past = _BlockRequests(None, torch.zeros_like(past.due))
        self._resting = 0
        return tokens

    def _archived(self, held: Held) -> tuple[Archive, _BlockRequests]:
        """With all blocks of these tokens that are full."""
        if self.archive is None or self._past is None:
            size, chooses = self.site.sizes.block_size, self.leader is None
            self.archive = Archive(self.settings, size, self.site.store, chooses)
            self._past = _BlockRequests(None, torch.zeros_like(self.archive.stored))
        self.archive.take_in(held)
        return self.archive, self._past

    # ---- which block makes room -----------------------------------------------------------------------------------

    def scores(self, table: BlockTable) -> Tensor:
        """See `EvictionAction.scores`: the block goes first that no query has needed for longest; of several, the
        oldest."""
        frames = Frames.of(table)
        wanted_at = None if self._past is None else self._past.wanted_at
        ranks = frames.ids if wanted_at is None else order(wanted_at, frames.ids)
        return scores_in_slots(table, ranks.float())

    def best_blocks(
        self, table: BlockTable, scores: Tensor, positions: Tensor, columns: int, sizes: BlockBudget
    ) -> Tensor:
        """See `EvictionAction.best_blocks`."""
        size = sizes.block_size
        rank = rank_whole_blocks(scores, positions, columns // size + 1, size, self.site.absolute_noise)
        blocks = torch.arange(rank.shape[-1], device=rank.device).expand_as(rank)
        return best_blocks(rank, positions.expand_as(scores), protected_blocks(table, blocks), sizes)

    # ---- back from host memory ------------------------------------------------------------------------------------

    def extra_attention(self, call: AttentionCall) -> Iterable[Part] | None:
        """Bring back the blocks that a single query needs. Several queries, or blocks="all", attend to the whole
        text."""
        if self.settings.keep < 1 and call.waiting and call.table.seen == 0:
            self._looked = look(call, self.site, self.settings.keep)
        if self.archive is None or self._past is None:
            return None
        if call.queries.query.shape[2] > 1 or self.settings.blocks == "all":
            return self.archive.away(call.table.positions)
        if self._resting and call.real is None:
            self._resting -= 1
        else:
            self._recall(call, self.archive, self._past)
        return None

    def _recall(self, call: AttentionCall, archive: Archive, past: _BlockRequests) -> None:
        table = call.table
        frames = Frames.of(table)
        due = frames.away & (frames.count >= past.due)
        if call.real is not None:
            due = due & call.real[:, 0]
        choice = self._choice = self._choose(call, archive, frames, due)
        chosen, ids, now = choice.chosen, choice.ids, frames.count[:, None, None]
        present = frames.present(chosen.shape[-1])
        in_slots = frames.ids >= 0
        wanted = in_slots & chosen.gather(-1, frames.ids.clamp_min(0))
        wanted_at = torch.zeros_like(frames.ids) if past.wanted_at is None else past.wanted_at
        wanted_at = torch.where(wanted | (frames.newest & frames.away[:, None, None]), now, wanted_at)
        missing = chosen.gather(-1, ids) & ~present.gather(-1, ids)
        again = missing & (ids == frames.leaving[..., None])
        here = present.gather(-1, choice.next.clamp_min(0))
        flags, come, soon = _on_host(
            torch.stack([due.all(), due.any(), again.any()]),
            ids.masked_fill(~missing, -1),
            choice.next.masked_fill(here, -1),
        )
        heads = call.queries.key.shape[1]
        places = Places.of(come, heads)
        if len(places):
            free = in_slots & ~wanted & ~frames.pinned(self.site.sizes, table)
            going = order(wanted_at, frames.ids).masked_fill(~free, KEEP).argsort(dim=-1)
            first = (~missing).long().argsort(dim=-1, stable=True)
            coming, make_room = missing.gather(-1, first), going[..., : ids.shape[-1]]
            swap = Swap(ids.gather(-1, first), make_room, coming, len(places), bool(flags[2]))
            fetched = archive.host.parts(self.stage.take(archive.host, places))
            swap.carry_out(table, frames, self.site.store, fetched, self._copies(call))
            self._faults += len(places)
            came_at = torch.where(coming, now, wanted_at.gather(-1, make_room))
            wanted_at = wanted_at.scatter(-1, make_room, came_at)
        if self.settings.prefetch and bool(flags[1]):
            self.stage.fill(archive.host, Places.of(soon, heads))
        every = self.settings.every
        self._past = _BlockRequests(wanted_at, torch.where(due, frames.count + every, past.due))
        self._resting = every - 1 if bool(flags[0]) else 0

    def _choose(self, call: AttentionCall, archive: Archive, frames: Frames, due: Tensor) -> Choice:
        """Choose the blocks that the query needs."""
        if self.leader is not None:
            return self.leader.choice_for(frames.ids)
        sizes, scores = self.site.sizes, archive.summaries.scores(call.queries.query)
        if self.site.heads == "shared":
            scores = scores.mean(1, keepdim=True)
        blocks = torch.arange(scores.shape[-1], device=scores.device)
        recent = (frames.count // sizes.block_size - sizes.recent_blocks)[:, None, None]
        there = (blocks < archive.stored[:, None, None]) & (blocks < recent) & due[:, None, None]
        there = there.expand_as(scores) & ~self._always(call.table, frames, blocks.expand_as(scores))
        if self._looked is not None:
            later = there.shape[-1] - self._looked.shape[-1]
            there = there & torch.nn.functional.pad(self._looked, (0, later), value=True)[..., : there.shape[-1]]
        return Choice.of(scores, there, int(self.settings.blocks), self.settings.prefetch)

    def _always(self, table: BlockTable, frames: Frames, blocks: Tensor) -> Tensor:
        """Bool, which of the blocks `[B, S, n]` are protected in every layer, so that no query has to choose them."""
        if self.settings.layers == 1:
            return protected_blocks(table, blocks) & frames.present(blocks.shape[-1])
        # Spans may have been evicted before they were protected.
        return blocks * table.block_size < self.site.sizes.protected

    def choice_for(self, ids: Tensor) -> Choice:
        """The choice of this step's query, for a later layer that holds the blocks `ids` `[B, S, F]`.

        Raises:
            RuntimeError: the layers have different numbers of KV heads.
        """
        choice = self._choice
        if choice is None or choice.ids.shape[:2] != ids.shape[:2]:
            raise RuntimeError(
                "recall(layers=...): a layer cannot use the choice of the one before it, because they have different "
                "numbers of KV heads. Use layers=1 or heads='shared'."
            )
        return map_tensors(lambda states: states.to(ids.device), choice)

    def _copies(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Keys and values in which the slots have to change beside the store: what attention was given, where that is a
        copy; None = it is the store's own.

        Raises:
            RuntimeError: attention was given something else than the cache returned.
        """
        store, passed_states = self.site.store, (call.queries.key, call.values)
        kv_unchanged = call.waiting or call.kv_unchanged
        if not call.waiting:
            kv_unchanged = all(
                passed.data_ptr() == stored.data_ptr()
                for stored, passed in zip(store.tensors, passed_states, strict=True)
            )
        if not kv_unchanged:
            raise RuntimeError(
                "recall changes keys and values in place, but this model changes them between the cache and "
                "attention. Use disposal='drop'."
            )
        return passed_states if call.waiting else None

    def check_removal(self, left: bool, ends: bool) -> None:
        """See `EvictionAction.check_removal`. A block holds consecutive tokens, and blocks in host memory never
        change."""
        if self.archive is not None or not ends:
            raise ValueError(
                "recall brings whole blocks of consecutive tokens back, and attention_mask hides tokens of the past "
                + ("that stand before others" if self.archive is None else "of which it has copied blocks")
                + ". Use disposal='drop', a budget that holds the whole text, or keep the mask of the past as it was."
            )

    def check_crop(self, count: int) -> None:
        """See `EvictionAction.check_crop`."""
        if self.archive is not None:
            raise ValueError(
                f"Cannot take back {count} tokens: blocks have been moved to host memory since. Call "
                "`cache.activate_past_recording()` before the forward that may be taken back."
            )


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
