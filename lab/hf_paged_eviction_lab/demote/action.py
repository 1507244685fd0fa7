"""What demoting keeps of one layer, and how tokens come to it and leave it for good."""

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    AttentionCall,
    BlockTable,
    Codec,
    Extra,
    Held,
    Part,
    Site,
    byte_count,
    gather_slots,
)

from ..actions import StatefulAction
from .demoted import Demoted, balance


class DemoteAction(StatefulAction[Demoted]):
    """Rounds every token that leaves, once, and keeps as many of them as fit into its bytes.

    Attributes:
        places: `L`, how many tokens fit; known from the first forward on.

    Args:
        site: the layer.
        bits, share: see `Demote`.
    """

    reads = True

    def __init__(self, site: Site, bits: int, share: float) -> None:
        self.site, self.share = site, share
        self.codec = Codec(bits)
        self.places = 0
        self._sets = 1

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def bytes_for(self, keys: Tensor, values: Tensor, slot_bytes: int) -> tuple[int, int]:
        """See `EvictionAction.bytes_for`: of all bytes, the slots take what the share leaves."""
        return int(-(-slot_bytes // (1 - self.share))), 0

    def _fitting(self, capacity: int) -> int:
        """Tokens that fit beside so many slots.

        Raises:
            ValueError: not one.
        """
        keys, values = self.site.store.read()
        share = self.share
        room = int(capacity * self.site.store.token_bytes(keys, values) * share / (1 - share))
        channels = keys[:, :, :1].to("meta", torch.float32)
        one, two = (byte_count(*vars(self._empty(count, channels)).values()) for count in (1, 2))
        size = two - one
        room -= one - size
        if room < size:
            raise ValueError(
                f"demote(share={share}): beside {capacity} tokens in full precision there are {max(room, 0)} bytes for "
                f"the others, and one takes {size}. Use a larger share or budget."
            )
        return room // size

    @property
    def count(self) -> int:
        """Tokens that are held in few bits, summed over rows and averaged over sets of heads. Reads tensors."""
        if not self.any:
            return 0
        positions = self.state.positions
        return int((positions >= 0).sum()) // positions.shape[1]

    # ---- life -----------------------------------------------------------------------------------------------------

    def empty(self, table: BlockTable) -> Demoted:
        """See `StatefulAction.empty`."""
        self._sets, self.places = table.phase.full_at.shape[1], self._fitting(table.capacity)
        keys, _ = self.site.store.read()
        return self._empty(self.places, torch.ones(*keys.shape[:2], 1, keys.shape[-1], device=table.device))

    def settle(self, kept_indices: Tensor | None, positions: Tensor, capacity: int) -> None:
        """See `EvictionAction.settle`: with fewer slots there are fewer places."""
        self.places = self._fitting(capacity)
        demoted = self.state
        if demoted.positions.shape[-1] > self.places:
            none = demoted.positions[..., :0].long(), demoted.scores[..., :0]
            chosen = demoted.ranks(*none, self.site.absolute_noise).topk(self.places, dim=-1).indices
            self.use(demoted.replaced(chosen, None, demoted.positions, demoted.scores))

    def _empty(self, places: int, channels: Tensor) -> Demoted:
        states, size = self.site.store.read(), self.site.sizes.block_size
        return Demoted.empty(self.codec, *states, self._sets, places, size, channels)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """Keep the scores by which the block was chosen: those in the table depend on when other rows choose."""
        if held.scores is None:
            raise RuntimeError("A block is chosen by scores.")
        self.state.begin(slots, begins, held.scores)

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """The lowest of those here and those that leave are dropped where there are too many."""
        demoted, positions, self.any = self.state, leaving.positions, True
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
        self.use(demoted.replaced(chosen, codes, every, torch.cat([demoted.scores, scores], dim=-1)))

    def _encode(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        codes = self.codec.encode(keys.detach().float() / self.state.channels), self.codec.encode(values.detach())
        return [part for coded in codes for part in (coded.packed, coded.levels)]

    # ---- attention ------------------------------------------------------------------------------------------------

    def extra_attention(self, call: AttentionCall) -> Extra | None:
        """See `EvictionAction.extra_attention`: all that is here, in the model's type."""
        if call.waiting and call.queries.query.shape[2] > 1:
            self._meet(call)
        if not self.any:
            return None
        demoted = self.state
        (keys, values), channels, dtype = demoted.codes, demoted.channels, call.values.dtype
        decoded_keys = (self.codec.decode(keys, channels.shape[-1], torch.float32) * channels).to(dtype)
        decoded_values = self.codec.decode(values, call.values.shape[-1], dtype)
        empty = demoted.positions < 0
        bias = torch.zeros_like(demoted.scores).masked_fill(empty, float("-inf"))
        return Extra([Part(decoded_keys, decoded_values, bias[:, :, None])])

    def _meet(self, call: AttentionCall) -> None:
        """The first tokens of some rows show how large their channels are. A single one shows nothing, whatever batch
        it comes in."""
        table, count = call.table, call.queries.query.shape[2]
        several = torch.full_like(table.pads, count) if call.real is None else call.real.sum(-1)
        first = (table.seen - table.pads == 0) & (several > 1)
        queries, keys = call.queries.query, call.queries.key[:, :, -count:]
        channels = balance(queries.detach(), keys.detach(), call.real)
        known = self.state.channels
        known.copy_(torch.where(first[:, None, None, None], channels, known))
