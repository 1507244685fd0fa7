"""Recall: evicted blocks go to host memory and come back when a query needs them."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_paged_eviction import Disposal, PagedEvictionCache
from hf_paged_eviction.internals import (
    KEEP,
    AttentionCall,
    BlockBudget,
    BlockTable,
    DisposalContext,
    EvictionAction,
    Extra,
    Held,
    Site,
    StateDict,
    map_tensors,
    rank_keys,
)

from ..actions import refuse
from ..replacement.base import order
from .archive import ROUND, Archive
from .frames import Frames, Swap, align, protected_blocks
from .host import Stage, places_of
from .look import look
from .summaries import Choice

__all__ = ["Recall"]


@dataclass(frozen=True)
class Recall(Disposal):
    """Keeps evicted blocks in host memory and brings back the blocks that a query needs.

    The device holds the slots of the budget and a summary of each block of the text. The query of each step scores the
    summaries. The best `blocks` that are not in the slots replace the blocks that no query has needed for longest, and
    attention runs over all slots, in place. A forward of several tokens (a chunk, a second turn) attends to the whole
    text: blocks in host memory are read in rounds, and the outputs are combined by their log-sum-exp. After such a
    forward the policy's scores decide which blocks stay in the slots; from then on the queries decide.

    Like ArkVale (NeurIPS 2024), the KV heads of a layer (with heads="separate" each KV head) choose by the mean of
    their query heads, and attention sees all slots. Quest (arXiv 2406.10774) keeps everything on the device, chooses
    per query head and attends to the chosen blocks only. Blocks that a single token brought back stay in the slots
    after `crop` takes that token back.

    Args:
        blocks: number of blocks that each query chooses, in addition to the protected ones; "all" reads the whole text
            at every step.
        every: number of tokens between two choices.
        summary: "box" (the smallest and the largest number of each channel, which bounds every product) or "vector"
            (MPCache, arXiv 2501.06807: half the memory, no bound).
        layers: number of neighbouring layers that share the choice of the first of them; the others need no summaries.
            A fact that the first layer does not look for is lost for all of them, and in a small model one layer may be
            the only one that finds it. Measure the cost before you use more than 1.
        keep: share of the blocks of a prompt that may come back, chosen once by the attention of the prompt's last
            queries (first stage of MPCache). It applies to a prompt of one forward, or to the first chunk; later blocks
            may always come back.
        prefetch: number of next best blocks that are copied to the device before the next choice, while other layers
            run. It changes only the time, and needs memory for these blocks.
        length: number of tokens of the longest text. Needed with a budget in bytes, which must have room for the
            summaries of so many; a longer text is refused. None = any length.

    Raises:
        ValueError: a value is out of range.
    """

    blocks: int | Literal["all"] = 8
    every: int = 1
    summary: Literal["box", "vector"] = "box"
    layers: int = 1
    keep: float = 1.0
    prefetch: int = 0
    length: int | None = None
    paper: ClassVar[str | None] = "2406.10774"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in {"blocks": 1, "every": 1, "layers": 1, "prefetch": 0, "length": 1}.items():
            value = getattr(self, name)
            if (name == "blocks" and value == "all") or (name == "length" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = ' or "all"' if name == "blocks" else ""
                raise ValueError(f"recall: {name} must be a whole number of at least {least}{also}, got {value!r}.")
        if self.prefetch and self.blocks == "all":
            raise ValueError("recall: blocks='all' reads everything at every step, so there is nothing to prefetch.")
        if self.summary not in ("box", "vector"):
            raise ValueError(f'recall: summary must be "box" or "vector", got {self.summary!r}.')
        if isinstance(self.keep, bool) or not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise ValueError(f"recall: keep must lie in (0, 1], got {self.keep!r}.")

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return RecallAction(self, site)

    def check(self, context: DisposalContext) -> None:
        """See `Disposal.check`."""
        long = {"memory": "summaries grow with the text, however long it may become. Use recall(length=TOKENS)"}
        refuse(
            context,
            self.name,
            static="a compiled step cannot read host memory. Use static=False",
            allocator="recall holds equally many blocks in every layer and head. Use allocator='uniform' and one "
            "number as budget",
            latent="no bound of a block's keys follows from bounds of latents. Use disposal='drop'",
            queries="under recall the queries choose the blocks, and the policy only scores blocks at first. Use one "
            "that reads keys and values, such as 'keydiff'",
            shared="each would need blocks of its own. Use disposal='drop'",
            mixed="attention would read recalled keys and values head by head. Use disposal='drop'",
            share="the number of blocks that a query may ask for depends on the budget in tokens. Use tokens or bytes",
            **({} if self.length is not None else long),
            coded="blocks are moved to host memory and back unrounded. Leave out bits=",
            positions="each step may bring back other blocks, so all keys in the slots would have to be rotated again "
            "at every step, and a forward of several tokens would still attend to the whole text. Use positions='text'",
        )
        if context.sizes.tokens is not None:
            self._check_room(context.sizes)

    def _check_room(self, sizes: BlockBudget) -> None:
        """The slots must have room for `blocks` recalled blocks."""
        budget, size = sizes.capacity, sizes.block_size
        always = sizes.protected_blocks + sizes.recent_blocks + 1
        recalled = 1 if self.blocks == "all" else self.blocks
        room = budget // size - always
        if recalled > room:
            smallest = (always + recalled) * size
            fits = f", or blocks={room} at most" if room > 0 and self.blocks != "all" else ""
            raise ValueError(
                f"recall(blocks={self.blocks}): a budget of {budget} tokens has room for {max(room, 0)} recalled "
                f"blocks of {size}, beside {sizes.protected_blocks} at the start, {sizes.recent_blocks} with the "
                "newest tokens and the one that is being filled. "
                f"Use a budget of {smallest} or more{fits}."
            )


class RecallAction(EvictionAction):
    """Copies every full block to host memory, and brings back the blocks that queries need.

    Nothing is copied while all tokens fit the budget. After that, host memory holds every full block, also those in the
    slots, because a block in the slots may be overwritten at any time.

    Attributes:
        leader: the action of an earlier layer whose choice this one uses; None = this one chooses itself.
        archive: all full blocks; None while all tokens fit the budget.
        stage: prefetched blocks.

    Args:
        settings: the option.
        site: the layer.
    """

    acts = reads = True
    STATE = "stored", "_looked", "_resting", "_faults"

    def __init__(self, settings: Recall, site: Site) -> None:
        self.settings, self.site = settings, site
        before = site.previous
        self._turn: int = (before._turn + 1) % settings.layers if isinstance(before, RecallAction) else 0
        self.leader: RecallAction | None = None
        if isinstance(before, RecallAction) and self._turn:
            self.leader = before.leader or before
        self.start(None)

    def start(self, table: BlockTable | None) -> None:
        """See `EvictionAction.start`."""
        self._table = table
        self.archive: Archive | None = None
        self._looked: Tensor | None = None  # [B, S, n] bool, which of the prompt's blocks may come back; None = all
        self._choice: Choice | None = None
        self._resting = 0  # steps that are known to need no choice
        self._faults = 0
        self.stage = Stage()

    @property
    def summary_bytes(self) -> int:
        """See `EvictionAction.summary_bytes`."""
        return 0 if self.archive is None else self.archive.summaries.bytes + self.stage.bytes

    @property
    def traffic(self) -> "Traffic":
        """What has gone to host memory and come back."""
        return Traffic(0 if self.archive is None else self.archive.host.bytes, self._faults)

    @property
    def table(self) -> BlockTable:
        """Of the layer.

        Raises:
            RuntimeError: the layer has met no token.
        """
        if self._table is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._table

    def bytes_for(self, keys: Tensor, values: Tensor, slot_bytes: int) -> tuple[int, int]:
        """See `EvictionAction.bytes_for`: summaries of the longest text, prefetched blocks, and those of
        one round."""
        settings, size = self.settings, self.site.sizes.block_size
        token = _token_bytes(keys) + _token_bytes(values)
        summaries = self._vectors * -(-(settings.length or 0) // size) * _token_bytes(keys)
        at_once = ROUND if settings.blocks == "all" else max(ROUND, int(settings.blocks))
        return slot_bytes, summaries + (settings.prefetch + at_once) * size * token

    @property
    def _vectors(self) -> int:
        """Number of vectors that summarise a block."""
        return 0 if self.leader is not None else 1 if self.settings.summary == "vector" else 2

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `EvictionAction.map_rows`."""
        self._looked = None if self._looked is None else change(self._looked)
        if self.archive is not None:
            due = self.archive.due
            self.archive.select(change(torch.arange(len(due), device=due.device)))
            self.stage.empty()

    # ---- saving ---------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> StateDict | None:
        """The archive by name. Prefetched blocks are left out, because host memory has them, too."""
        return None if self.archive is None else self.archive.state_dict()

    @stored.setter
    def stored(self, saved: StateDict | None) -> None:
        if saved is not None:
            self._begun(self.table.phase.full_at.shape[1]).load_state(saved)

    # ---- to host memory -------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """Copy the block that has just been filled."""
        self._begun(held.positions.shape[1]).take_in(held)

    def overflow(self, tokens: Held, leaves: Tensor, kept_indices: Tensor) -> tuple[Held, Tensor]:
        """Copy all full blocks, and keep whole ones. They move to other slots, so the record of when they were needed
        is dropped."""
        archive = self._begun(tokens.positions.shape[1])
        archive.take_in(tokens)
        archive.due, archive.wanted_at, self._resting = torch.zeros_like(archive.due), None, 0
        return tokens, self._best_blocks(tokens, kept_indices.shape[-1])

    def settle(self, kept_indices: Tensor | None, positions: Tensor, capacity: int) -> None:
        """See `EvictionAction.settle`: blocks begin at positions that are multiples of `P`."""
        align(self.table)

    def _begun(self, sets: int) -> Archive:
        """The archive, which there is from now on."""
        if self.archive is None:
            size, length = self.site.sizes.block_size, self.settings.length
            self.archive = Archive(self.site.store, size, sets, self._vectors, length)
        return self.archive

    # ---- which block makes room -----------------------------------------------------------------------------------

    def scores(self) -> Tensor:
        """See `EvictionAction.scores`: the block goes first that no query has needed for longest; of several, the
        oldest."""
        table = self.table
        frames = Frames.of(table)
        wanted_at = None if self.archive is None else self.archive.wanted_at
        ranks = (frames.ids if wanted_at is None else order(wanted_at, frames.ids)).float()
        logical, slots = ranks.repeat_interleave(table.block_size, dim=-1), table.phase.order
        return logical if slots is None else torch.empty_like(logical).scatter(-1, slots, logical)

    def _best_blocks(self, tokens: Held, capacity: int) -> Tensor:
        """Indices `[B, S, C]` of the tokens that stay: whole blocks by their mean score. They are what single tokens
        would have left: pads, whole blocks by position, and a last block with the newest tokens, followed by the end of
        an older block that they have not overwritten yet."""
        scores, positions, table, sizes = tokens.scores, tokens.positions, self.table, self.site.sizes
        if scores is None:
            raise RuntimeError("Tokens are chosen by scores.")
        size, columns = sizes.block_size, int(positions.amax()) + 1
        real = positions >= 0
        block, place = positions.clamp_min(0) // size, positions.clamp_min(0) % size
        none = scores.new_zeros(*scores.shape[:2], columns // size + 1)
        means = none.scatter_add(-1, block, scores.masked_fill(~real, 0.0)) / size
        whole = none.scatter_add(-1, block, real.to(none.dtype)) == size
        blocks = torch.arange(none.shape[-1], device=none.device).expand_as(none)
        keys = rank_keys(means, blocks * size, whole, self.site.absolute_noise)
        newest = (positions.amax(-1, keepdim=True) + 1) // size  # the block that is being filled
        stays = protected_blocks(table, blocks) | (blocks >= newest - sizes.recent_blocks)
        ranks = keys.masked_fill(stays, KEEP).argsort(dim=-1, stable=True).argsort(dim=-1)
        ranks = ranks.masked_fill(blocks >= newest, 2 * blocks.shape[-1])
        # Of the last block, only the end stays.
        rank = (ranks.gather(-1, block) * size + place).masked_fill(~real, -1)
        kept_indices = rank.topk(capacity, dim=-1).indices
        block, place, held = (of_token.gather(-1, kept_indices) for of_token in (block, place, positions))
        tokens_left = torch.zeros_like(keys).scatter_add(-1, block, (held >= 0).long()).gather(-1, block)
        # An incomplete block is the newest one, or the end of an older one.
        places = torch.where(tokens_left < size, KEEP - size + place, held).masked_fill(held < 0, -1)
        return kept_indices.gather(-1, places.argsort(-1))

    # ---- back from host memory ------------------------------------------------------------------------------------

    def extra_attention(self, call: AttentionCall) -> Extra | None:
        """Bring back the blocks that a single query needs. Several queries, or blocks="all", attend to the whole
        text."""
        if self.settings.keep < 1 and call.waiting and call.table.seen == 0:
            self._looked = look(call, self.site, self.settings.keep)
        if self.archive is None:
            return None
        if call.queries.query.shape[2] > 1 or self.settings.blocks == "all":
            return Extra(self.archive.away(call.table.positions))
        if self._resting and call.real is None:
            self._resting -= 1
        else:
            self._recall(call, self.archive)
        return None

    def _recall(self, call: AttentionCall, archive: Archive) -> None:
        table, every, prefetch = call.table, self.settings.every, self.settings.prefetch
        frames = Frames.of(table)
        due = frames.away & (frames.count >= archive.due)
        if call.real is not None:
            due = due & call.real[:, 0]
        choice = self._choice = self._choose(call, archive, frames, due)
        wanted = (frames.ids >= 0) & choice.chosen.gather(-1, frames.ids.clamp_min(0))
        wanted_at = torch.zeros_like(frames.ids) if archive.wanted_at is None else archive.wanted_at
        now, newest = frames.count[:, None, None], frames.newest & frames.away[:, None, None]
        archive.wanted_at = torch.where(wanted | newest, now, wanted_at)
        absent = ~frames.present(choice.chosen.shape[-1])
        missing = (choice.chosen & absent).gather(-1, choice.ids)
        again = missing & (choice.ids == frames.leaving[..., None])
        flags, come, soon = _on_host(
            torch.stack([due.all(), due.any(), again.any()]),
            choice.ids.masked_fill(~missing, -1),
            choice.next.masked_fill(~absent.gather(-1, choice.next.clamp_min(0)), -1),
        )
        if places := places_of(come):
            fetched = archive.host.parts(self.stage.take(archive.host, places))
            self._faults += len(places)
            free = (frames.ids >= 0) & ~wanted & ~frames.pinned(self.site.sizes, table)
            going = order(archive.wanted_at, frames.ids).masked_fill(~free, KEEP).argsort(dim=-1)
            first, make_room = (~missing).long().argsort(dim=-1, stable=True), going[..., : missing.shape[-1]]
            coming = missing.gather(-1, first)
            swap = Swap(choice.ids.gather(-1, first), make_room, coming, bool(flags[2]))
            swap.carry_out(table, frames, self.site.store, fetched, self._copies(call))
            came_at = torch.where(coming, now, archive.wanted_at.gather(-1, make_room))
            archive.wanted_at = archive.wanted_at.scatter(-1, make_room, came_at)
        if prefetch and bool(flags[1]):
            self.stage.fill(archive.host, places_of(soon))
        archive.due = torch.where(due, frames.count + every, archive.due)
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
        passed_states = call.queries.key, call.values
        if call.waiting:
            return passed_states
        stored = self.site.store.tensors
        if any(one.data_ptr() != other.data_ptr() for one, other in zip(passed_states, stored, strict=True)):
            raise RuntimeError(
                "recall changes keys and values in place, but this model changes them between the cache and "
                "attention. Use disposal='drop'."
            )
        return None

    def check_undo(self, cropped: int, evicted: bool) -> None:
        """See `EvictionAction.check_undo`. A block holds consecutive tokens, and blocks in host memory never change."""
        if cropped and self.archive is not None:
            raise ValueError(
                f"Cannot take back {cropped} tokens: blocks have been moved to host memory since. Call "
                "`cache.activate_past_recording()` before the forward that may be taken back."
            )
        if not cropped:
            raise ValueError(
                "recall brings whole blocks of consecutive tokens back, and attention_mask hides tokens of the past"
                f"{'' if self.archive is None else ' of which it has copied blocks'}. Use disposal='drop', or keep the "
                "mask of the past as it was."
            )


@dataclass(frozen=True)
class Traffic:
    """What is in host memory, and what came back.

    Attributes:
        host_bytes: bytes in host memory.
        faults: blocks that a query needed and that were not in the slots, summed over rows and sets of heads.
    """

    host_bytes: int
    faults: int


def traffic(cache: PagedEvictionCache) -> Traffic:
    """Of all layers of a cache together."""
    actions = [layer.action for _, layer in cache.paged_layers]
    layers = [action.traffic for action in actions if isinstance(action, RecallAction)]
    return Traffic(sum(layer.host_bytes for layer in layers), sum(layer.faults for layer in layers))


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
