"""What merging keeps of one layer, and how tokens are taken in."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    AttentionCall,
    BlockTable,
    Extra,
    Held,
    Site,
    slot_index,
)

from ..actions import StatefulAction
from .nearest import Nearest, nearest

#: Similarities that exist at one time, in bytes: where many tokens leave at once, they are searched for in pieces.
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Merged:
    """What is known of the slots `C` of a layer.

    Attributes:
        mass: `[B, H, C]` float32, weight of the token in each slot and of all that it took in; 1 where it took in none.
        places: `[B, S, C]` int64, positions of the tokens that may take others in while the present block is being
            overwritten, -1 elsewhere. In a row that has overwritten nothing yet it means nothing.
        threshold: `[B, H]` float32, nan where nothing has left yet.
    """

    mass: Tensor
    places: Tensor
    threshold: Tensor


class MergeAction(StatefulAction[Merged]):
    """Puts every token that leaves into the one that is most like it, if it is like enough.

    All happens in the slots: a single token that leaves costs one search, without a read on the host.

    Args:
        site: the layer.
        values_only, threshold: see `Merge`.
    """

    def __init__(self, site: Site, values_only: bool, threshold: float | Literal["ema"]) -> None:
        self.site, self.threshold = site, threshold
        self.values_only = self.reads = values_only
        self._choosing: Tensor | None = None  # `mass` of the tokens that are being chosen from

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, table: BlockTable | None) -> None:
        """See `EvictionAction.start`."""
        super().start(table)
        self._choosing = None

    def empty(self, table: BlockTable) -> Merged:
        """See `StatefulAction.empty`."""
        sets, heads, device = table.phase.full_at.shape, self.site.store.columns.shape[1], table.device
        return Merged(
            mass=torch.ones(table.rows, heads, table.capacity, device=device),
            places=torch.full((*sets, table.capacity), -1, device=device),
            threshold=torch.full((table.rows, heads), float("nan"), device=device),
        )

    def settle(self, kept_indices: Tensor | None, positions: Tensor, capacity: int) -> None:
        """See `EvictionAction.settle`."""
        merged = self.state
        mass = merged.mass if self._choosing is None else self._choosing
        self._choosing = None
        held = positions.shape[-1]
        if kept_indices is not None:  # the index of a pad or dead slot means nothing
            mass = mass.gather(-1, kept_indices.expand(-1, mass.shape[1], -1))[..., :held]
            mass = mass.masked_fill(positions < 0, 1.0)
        mass = _padded(mass[..., :held], capacity)
        places = torch.full((*positions.shape[:2], capacity), -1, device=mass.device)
        self.use(Merged(mass, places, merged.threshold))

    # ---- one token ------------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """What stands in the chosen block, and what is written there, takes nothing in until the next choice.

        The former is about to leave. The latter has no score yet, and one that comes of a mean would depend on when it
        is worked out.
        """
        places, self.any = self.state.places, True
        places.copy_(held.positions.expand_as(places).scatter(-1, slots, -1))

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """One token of each row and set goes into another."""
        if slots is None:
            return
        merged, stored = self.state, self.site.store.tensors
        mass = merged.mass
        goes = leaving.positions >= 0
        own_slots = slots.expand(-1, mass.shape[1], -1)
        target = nearest(leaving.keys, stored[0], merged.places)
        share = self._share(target, goes.expand_as(target.exists), target.similarity) * mass.gather(-1, own_slots)
        before = mass.gather(-1, target.index)
        for states, left in zip(stored, (leaving.keys, leaving.values), strict=True):
            if states is stored[0] and self.values_only:
                continue
            taken = states.gather(2, slot_index(target.index, states))
            new = _mean(taken, before[..., None], left.float() * share[..., None], share[..., None])
            _write(states, target.index, new)
        mass.scatter_(-1, target.index, before + share)
        mass.scatter_(-1, own_slots, mass.gather(-1, own_slots).masked_fill(goes.expand_as(own_slots), 1.0))

    def _share(self, target: Nearest, goes: Tensor, mean: Tensor) -> Tensor:
        """`[B, H, n]` the weight with which each token that `goes` is taken in, 0 = dropped. Moves the threshold.

        Args:
            mean: `[B, H, 1]` similarity of those that go.
        """
        goes = goes & target.exists
        threshold = self.threshold
        if threshold == "ema":
            old = self.state.threshold[..., None]
            moved = torch.where(old.isnan(), mean, 0.5 * old + 0.5 * mean)
            limit = torch.where(goes.any(-1, keepdim=True), moved, old)
            self.state.threshold.copy_(limit[..., 0])
        else:
            limit = torch.full_like(mean, float(threshold))
        like = goes & (target.similarity > 0) & (target.similarity >= limit)
        weight = torch.ones_like(target.similarity) if self.values_only else target.similarity
        return weight.masked_fill(~like, 0.0)

    # ---- many tokens ----------------------------------------------------------------------------------------------

    def overflow(self, tokens: Held, leaves: Tensor, kept_indices: Tensor) -> tuple[Held, Tensor]:
        """All that leave go into those that stay."""
        self.any = True
        mass = _padded(self.state.mass, leaves.shape[-1])
        heads = mass.shape[1]
        stays = (tokens.positions >= 0) & ~leaves
        most_leave, most_stay = torch.stack([leaves.sum(-1).amax(), stays.sum(-1).amax()]).tolist()
        going, staying = (
            which.byte().argsort(dim=-1, descending=True, stable=True)[..., :most]
            for which, most in ((leaves, most_leave), (stays, most_stay))
        )
        self._choosing = mass
        if not most_leave or not most_stay:
            return tokens, kept_indices
        places = tokens.positions.masked_fill(~stays, -1).gather(-1, staying)
        goes = leaves.gather(-1, going).expand(-1, heads, -1)
        index_go, index_stay = (index.expand(-1, heads, -1) for index in (going, staying))
        staying_states = [states.gather(2, slot_index(index_stay, states)) for states in (tokens.keys, tokens.values)]
        left = [states.gather(2, slot_index(index_go, states)) for states in (tokens.keys, tokens.values)]
        target = _search(left[0], staying_states[0], places)
        counted = (goes & target.exists).double()
        mean = (target.similarity * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp_min(1)
        share = self._share(target, goes, mean.float()) * mass.gather(-1, index_go)
        before = mass.gather(-1, index_stay)
        more = torch.zeros_like(before).scatter_add(-1, target.index, share)
        result = [tokens.keys, tokens.values]
        for at in range(int(self.values_only), 2):
            index, weighted = slot_index(target.index, staying_states[at]), left[at].float() * share[..., None]
            # What is dropped may be anything, and 0 x nan is nan.
            weighted = weighted.masked_fill((share == 0)[..., None], 0.0)
            sums = torch.zeros(staying_states[at].shape, device=mass.device).scatter_add(
                2, index.expand_as(weighted), weighted
            )
            new = _mean(staying_states[at], before[..., None], sums, more[..., None])
            result[at] = result[at].scatter(2, slot_index(index_stay, result[at]).expand_as(new), new)
        self._choosing = mass.scatter(-1, index_stay, before + more)
        return Held(result[0], result[1], tokens.positions), kept_indices

    # ---- attention ------------------------------------------------------------------------------------------------

    def extra_attention(self, call: AttentionCall) -> Extra | None:
        """See `EvictionAction.extra_attention`: the logarithm of how many tokens each stands for."""
        if not self.any:
            return None
        return Extra(bias=_padded(self.state.mass, call.queries.key.shape[2]).log()[:, :, None])


def _padded(mass: Tensor, tokens: int) -> Tensor:
    """For so many tokens: those that are added weigh 1."""
    return torch.nn.functional.pad(mass, (0, tokens - mass.shape[-1]), value=1.0)


def _mean(states: Tensor, mass: Tensor, sums: Tensor, more: Tensor) -> Tensor:
    """`states` of weight `mass` with others, whose weighted `sums` weigh `more`; as they are where that is 0."""
    mean = (states.float() * mass + sums) / (mass + more)
    return torch.where(more > 0, mean.to(states.dtype), states)


def _search(keys: Tensor, kept_keys: Tensor, places: Tensor) -> Nearest:
    """`nearest`, a piece of the tokens that leave at a time."""
    rows, heads, count, _ = kept_keys.shape
    size = max(1, _PIECE // (8 * rows * heads * count))
    pieces = [nearest(piece, kept_keys, places) for piece in keys.split(size, dim=2)]
    index, similarity, are = zip(*(vars(piece).values() for piece in pieces), strict=True)
    return Nearest(torch.cat(index, -1), torch.cat(similarity, -1), torch.cat(are, -1))


def _write(states: Tensor, index: Tensor, new: Tensor) -> None:
    """`new` `[B, H, 1, D]` to the slots `[B, H, 1]`."""
    rows, heads = states.shape[:2]
    row, head = torch.arange(rows, device=states.device)[:, None], torch.arange(heads, device=states.device)
    # Not scatter_, for which inductor copies the whole storage.
    states.index_put_((row, head, index[..., 0]), new[:, :, 0])
