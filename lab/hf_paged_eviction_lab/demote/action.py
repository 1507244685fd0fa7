"""What demoting keeps of one layer, and how tokens come to it and leave it for good."""

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    AttentionCall,
    BlockTable,
    EvictionAction,
    Held,
    Part,
    SavedState,
    Site,
    StateDict,
    StateKind,
    gather_slots,
    map_tensors,
    persistent,
)

from .balance import Balance, Balancer
from .demoted import Demoted


class DemoteAction(EvictionAction):
    """Rounds every token that leaves, once, and keeps as many of them as fit into its bytes.

    Attributes:
        places: `L`, how many tokens fit; known from the first forward on.

    Args:
        site: the layer.
        bits, share, balance: see `Demote`.
    """

    plans = takes = reads = True

    def __init__(self, site: Site, bits: int, share: float, balance: Balance) -> None:
        self.site, self.share = site, share
        self.balancer = Balancer(bits, balance)
        self.places = 0
        self._sets = 1
        self._channels: Tensor | None = None
        self.demoted: Demoted | None = None

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def slot_bytes(self, token_bytes: int) -> int:
        """See `EvictionAction.slot_bytes`: of all bytes, the slots take what the share leaves."""
        return int(-(-token_bytes // (1 - self.share)))

    def _fitting(self, capacity: int) -> int:
        """Tokens that fit beside so many slots.

        Raises:
            ValueError: not one.
        """
        keys, values = self.site.store.read()
        share = self.share
        room = int(capacity * self.site.store.token_bytes(keys, values) * share / (1 - share))
        room -= keys[:, :, :1].numel() * 4  # channels
        room -= keys.shape[0] * self._sets * self.site.sizes.block_size * 8  # the block that is leaving
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in self.balancer.shapes(keys, values, 1))
        size += keys.shape[0] * self._sets * 8  # position and score
        if room < size:
            raise ValueError(
                f"demote(share={share}): beside {capacity} tokens in full precision there are {max(room, 0)} bytes for "
                f"the others, and one takes {size}. Use a larger share or budget."
            )
        return room // size

    @property
    def device_bytes(self) -> int:
        return 0 if self.demoted is None else self.demoted.bytes

    @property
    def demoted_tokens(self) -> int:
        if self.demoted is None:
            return 0
        positions = self.demoted.positions
        return int((positions >= 0).sum()) // positions.shape[1]

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, sets: int, capacity: int, device: torch.device) -> None:
        """See `EvictionAction.start`."""
        self._sets, self.demoted = sets, None
        self.places = self._fitting(capacity)
        keys = self.site.store.read()[0]
        self._channels = persistent(torch.ones(rows, heads, 1, keys.shape[-1], device=device))

    @property
    def channels(self) -> Tensor:
        """See `Demoted`.

        Raises:
            RuntimeError: the layer has met no token.
        """
        if self._channels is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._channels

    def clear(self) -> None:
        """See `EvictionAction.clear`."""
        self.demoted = self._channels = None

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `EvictionAction.map_rows`."""

        def changed(tensor: Tensor) -> Tensor:
            return persistent(change(tensor))

        if self.demoted is not None:
            self.demoted = map_tensors(changed, self.demoted)
            self._channels = self.demoted.channels
        elif self._channels is not None:
            self._channels = changed(self._channels)

    def settle(self, kept_indices: Tensor | None, positions: Tensor, capacity: int) -> None:
        """See `EvictionAction.settle`: with fewer slots there are fewer places."""
        self.places = self._fitting(capacity)
        demoted = self.demoted
        if demoted is not None and demoted.positions.shape[-1] > self.places:
            none = demoted.positions[..., :0].long(), demoted.scores[..., :0]
            chosen = demoted.ranks(*none, self.site.absolute_noise).topk(self.places, dim=-1).indices
            self._use(demoted.replaced(chosen, None, demoted.positions, demoted.scores))

    def _use(self, demoted: Demoted) -> None:
        self.demoted = map_tensors(persistent, demoted)
        self._channels = self.demoted.channels

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def _empty(self) -> Demoted:
        shapes = self.balancer.shapes(*self.site.store.read(), self.places)
        return Demoted.empty(shapes, self._sets, self.site.sizes.block_size, self.channels)

    def _ready(self) -> Demoted:
        if self.demoted is None:
            self.demoted = self._empty()
        return self.demoted

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """Keep the scores by which the block was chosen: those in the table depend on when other rows choose."""
        if held.scores is None:
            raise RuntimeError("A block is chosen by scores.")
        self._ready().begin(slots, begins, held.scores)

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """The lowest of those here and those that leave are dropped where there are too many."""
        demoted, positions = self._ready(), leaving.positions
        places = demoted.positions.shape[-1]
        if slots is not None:
            scores = demoted.scores_of(slots)
            place = demoted.ranks(positions, scores, self.site.absolute_noise).argmin(-1, keepdim=True)
            goes_in = (positions >= 0) & (place < places)
            codes = self._encode(leaving.keys, leaving.values)
            demoted.put(place.clamp_max(places - 1), goes_in, codes, positions, scores)
            return
        if leaving.scores is None:
            raise RuntimeError("Tokens are chosen by scores.")
        scores = leaving.scores
        ranks = demoted.ranks(positions, scores, self.site.absolute_noise)
        chosen = ranks.topk(places, dim=-1).indices
        every = torch.cat([demoted.positions.long(), positions], dim=-1)
        # In the order of the text; those without a token come first.
        chosen = chosen.gather(-1, every.gather(-1, chosen).argsort(stable=True, dim=-1))
        new = (chosen - places).clamp_min(0)
        codes = self._encode(gather_slots(leaving.keys, new), gather_slots(leaving.values, new))
        self._use(demoted.replaced(chosen, codes, every, torch.cat([demoted.scores, scores], dim=-1)))

    def _encode(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        codes = self.balancer.encode(keys.detach(), values.detach(), self.channels)
        return [part for coded in codes for part in (coded.packed, coded.levels)]

    # ---- attention ------------------------------------------------------------------------------------------------

    def extra_attention(self, call: AttentionCall) -> Iterable[Part] | None:
        """See `EvictionAction.extra_attention`: all that is here, in the model's type."""
        if call.waiting and call.queries.query.shape[2] > 1:
            self._meet(call)
        demoted = self.demoted
        if demoted is None:
            return None
        dims = self.channels.shape[-1], call.values.shape[-1]
        keys, values = self.balancer.decode(demoted.codes, dims, call.values.dtype, self.channels)
        empty = demoted.positions < 0
        bias = torch.zeros_like(demoted.scores).masked_fill(empty, float("-inf"))
        return [Part(keys, values, bias[:, :, None])]

    def _meet(self, call: AttentionCall) -> None:
        """The first tokens of some rows show how large their channels are. A single one shows nothing, whatever batch
        it comes in."""
        table, count = call.table, call.queries.query.shape[2]
        several = torch.full_like(table.pads, count) if call.real is None else call.real.sum(-1)
        first = (table.seen - table.pads == 0) & (several > 1)
        queries, keys = call.queries.query, call.queries.key[:, :, -count:]
        channels = self.balancer.channels(queries.detach(), keys.detach(), call.real)
        self.channels.copy_(torch.where(first[:, None, None, None], channels, self.channels))

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict | None:
        """See `EvictionAction.state_dict`."""
        if self._channels is None:
            return None
        return dict(vars(self.demoted or self._empty()))

    def load_state(self, saved: SavedState | None, table: BlockTable, kind: StateKind) -> None:
        """See `EvictionAction.load_state`."""
        if saved is None:
            return
        held = Demoted(**{name: saved.like(name, tensor) for name, tensor in vars(self._empty()).items()})
        in_range = (held.positions >= -1) & (held.positions < 2**31 - 1)
        saved.need(in_range.all(), "positions are out of range")
        divided = (held.channels > 0) & held.channels.isfinite()
        saved.need(divided.all(), "channels are divided by what is not positive")
        self._use(held)
        if not bool((held.positions >= 0).any()):
            self.demoted = None  # nothing has left, and attention reads the slots alone
