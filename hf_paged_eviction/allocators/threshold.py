"""One threshold over all layers and KV heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..integration.heads import LocalHeads
from ..policies import EvictionPolicy
from ..ranking import DROP, KEEP
from ..saved import SavedState
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .base import BudgetAllocator
from .quota import Quota
from .registry import register_allocator
from .sharing import Sharing

#: One part in so many of the budget may be held beyond it while a forward walks through the layers. To give tokens up
#: rewrites all slots of all layers so far; with small chunks every layer would ask for it.
_SPARE = 20


@register_allocator("global")
@dataclass(frozen=True)
class Global(BudgetAllocator):
    r"""Keeps the tokens with the highest scores of all layers and KV heads together.

    .. math::

        b_{\ell,h} = \bigl| \{ t : s_{\ell,h,t} \ge \theta \} \bigr|, \quad
        \theta \text{ such that } \sum_{\ell,h} b_{\ell,h} = \text{budget} \cdot L H

    This is the rule of KVzip (arXiv 2505.23416), for any policy whose scores mean the same in every layer and head
    (`Needs.common_unit`); other policies are refused. Every head keeps its protected tokens, its newest block and one
    block to evict, so a small block size leaves more to the threshold. Beyond that it holds exactly its tokens above
    the threshold, not whole blocks.

    A forward of several tokens decides layer by layer. The best tokens of the layers so far contain the best of all
    layers, so the result is that of one decision at the end. Layers give up tokens after the new tokens have attended
    to them: as soon as the layers so far hold more than their share and as much again as one layer has just received
    (at least a twentieth of the budget), and after the last layer, when all together hold the budget.

    Single tokens lead to a new decision whenever a block is full, for all layers at once, with room in each head for
    the next tokens. While `crop` may take tokens back, each head gives up one of its own blocks instead.
    """

    paper: ClassVar[str | None] = "2505.23416"
    per_head: ClassVar[bool] = True


def check_common_unit(policy: EvictionPolicy) -> None:
    """Refuse scores that mean something else in every layer or head.

    Raises:
        ValueError: with the way out.
    """
    if not policy.needs.common_unit:
        raise ValueError(
            f"allocator='global' compares the scores of all layers and heads, and those of {policy.label!r} have no "
            "common unit. Use a policy whose scores have one: 'calibrated:FILE' (paged-eviction prepare), "
            "'self_calibrated', 'gate:FILE', 'expected_attention' or 'kvzip'; or an allocator that compares less: "
            "'ada_kv', 'uniform'."
        )


class Threshold(Sharing):
    """Finds what is above the threshold among all that was offered so far.

    What it remembers of a token is its rank, in order and without its place: 8 bytes per token and KV head.

    Args:
        budget: mean share.
    """

    def __init__(self, budget: BlockBudget) -> None:
        super().__init__(budget)
        self._offered: dict[int, Tensor] = {}  # by place, [B, sets, tokens] ranks, the best first
        self._fitted: dict[int, Tensor] = {}  # by place, [B, sets] tokens, the share that the layer was brought to last
        self._decided = True

    def knows(self, place: int) -> bool:
        """Whether this layer has offered what it holds."""
        return place in self._offered

    def offer(self, place: int, ranks: Tensor, least: Tensor) -> None:
        """What a layer could keep.

        Args:
            ranks: `[B, sets, tokens]` int64, comparable over layers; `KEEP` for protected tokens, `DROP` for none.
            least: `[B]` tokens that each set has room for in any case, also where it does not have so many.
        """
        least = least.clamp_max(self.budget.capacity)
        missing = max(int(least.max()) - ranks.shape[-1], 0)
        ranks = pad(ranks.sort(dim=-1, descending=True).values, (0, missing), value=DROP)
        certain = torch.arange(ranks.shape[-1], device=ranks.device) < least[:, None, None]
        self._offered[place] = ranks.masked_fill(certain, KEEP)
        self._decided = False

    def forget(self, place: int) -> None:
        """What this layer offered is no longer what it holds."""
        for known in (self._offered, self._shares, self._fitted):
            known.pop(place, None)

    def share(self, place: int) -> Tensor | None:
        """See `Sharing.share`; decided when somebody asks."""
        if not self._decided:
            self._decide()
        return super().share(place)

    def fitted(self, place: int) -> Tensor | None:
        """As `share`; the layer holds no more from now on."""
        share = self.share(place)
        if share is not None:
            self._fitted[place] = share
        return share

    def crowded(self, place: int, came: int) -> bool:
        """Whether layers have to give up now what they do not need: the last one is through, or those that are hold too
        much.

        Args:
            place: of the layer that has just taken in new tokens.
            came: how many, in each head.
        """
        if place == self.layers - 1:
            return True
        device, sets = self._shares[place].device, self._shares[place].shape[1]
        through = [(at, held) for at, held in self._fitted.items() if at <= place]
        much = [(held - self._shares[at].to(held.device)).sum(-1) for at, held in through]
        surplus = torch.stack([each.to(device) for each in much]).sum(0)  # [B]
        return int(surplus.amax()) > max(came * sets, self.budget.capacity * self.layers * sets // _SPARE)

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """See `Sharing.protect`. Layers offer anew what they hold."""
        super().protect(spans)
        self._ask_anew()

    def shrink(self, budget: BlockBudget) -> None:
        """See `Sharing.shrink`. Layers offer anew what they hold: what they offered last may be room for single tokens,
        which is more than the new budget has."""
        super().shrink(budget)
        self._ask_anew()

    def _ask_anew(self) -> None:
        """Layers offer again what they hold."""
        self._offered, self._decided = {}, True

    def _decide(self) -> None:
        places, mean = sorted(self._offered), self.budget.capacity
        device = self._offered[places[0]].device
        counts = self._above(places, device)
        sets = sum(count.shape[1] for count in counts)
        most = torch.stack([count.amax(-1) for count in counts]).amax(0)[:, None]  # [B, 1]
        spare = torch.zeros_like(most)
        if len(places) == self.layers:  # the others have not said what they need
            spare = (mean * sets - torch.cat(counts, dim=1).sum(-1, keepdim=True)).clamp_min(0) // sets
        for place, count in zip(places, counts, strict=True):
            share = torch.where(most <= mean, mean, count + spare)
            offered = self._offered[place]
            beyond = torch.arange(offered.shape[-1], device=device) >= share.to(offered.device)[..., None]
            self._offered[place] = offered.masked_fill(beyond, DROP)[..., : int(share.max())]
            self._shares[place] = share.to(offered.device)
        self._decided = True

    def _above(self, places: list[int], device: torch.device) -> list[Tensor]:
        """`[B, sets]` per place, how many of the tokens offered are among the best of all."""
        offered = [self._offered[place].to(device) for place in places]
        ranks = torch.cat([each.flatten(1) for each in offered], dim=1)
        sets = [each.shape[1] for each in offered]
        total = self.budget.capacity * (sum(sets) + (self.layers - len(places)) * sets[-1])
        kept = ranks > DROP
        if ranks.shape[1] > total:
            lowest = ranks.kthvalue(ranks.shape[1] - total + 1, dim=-1, keepdim=True).values
            above, equal = ranks > lowest, (ranks == lowest) & kept
            kept = above | (equal & (equal.cumsum(-1) <= total - above.sum(-1, keepdim=True)))
        parts = kept.split([each[0].numel() for each in offered], dim=1)
        return [part.view(each.shape).sum(-1) for part, each in zip(parts, offered, strict=True)]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Sharing.map_rows`. Layers offer anew what they then hold."""
        super().map_rows(change)
        self._fitted = {place: change(share) for place, share in self._fitted.items()}
        self._ask_anew()

    def clear(self) -> None:
        """See `Sharing.clear`."""
        super().clear()
        self._fitted = {}
        self._ask_anew()

    def load_state(self, saved: SavedState, rows: int) -> None:
        """See `Sharing.load_state`."""
        super().load_state(saved, rows)
        self._fitted = dict(self._shares)

    def _mean(self, tokens: int, sets: int) -> int:
        size = self.budget.block_size
        return -(-tokens // (sets * size)) * size


class ThresholdQuota(Quota):
    """A number for each row and KV head, from one threshold over all layers.

    Args:
        asked: see `Quota`.
        threshold: one object per cache.
        place: of the layer among those of the cache.
    """

    unequal = True
    common = True

    def __init__(self, asked: BlockBudget, threshold: Threshold, place: int) -> None:
        super().__init__(asked)
        self._threshold, self._place = threshold, place

    def check(self, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `Quota.check`."""
        if local_heads.processes(kv_heads) > 1:
            raise ValueError(
                "The allocator 'global' compares all KV heads of all layers, and tensor parallelism gave some to other "
                "processes, which would have to make room for what is decided here. Use allocator='uniform' or one "
                "that shares out among layers, or keep the model in one process."
            )

    def clear(self) -> None:
        """See `Quota.clear`."""
        super().clear()
        self._threshold.forget(self._place)

    @property
    def offered(self) -> bool:
        """See `Quota.offered`."""
        return self.scores is not None and self._threshold.knows(self._place)

    def offer(self, ranks: Tensor, least: Tensor) -> None:
        """See `Quota.offer`."""
        if self._threshold.budget.tokens is None:
            self._threshold.begin(self.budget)
        self._threshold.offer(self._place, ranks, least)

    def crowded(self, came: int) -> bool:
        """See `Quota.crowded`."""
        return self._threshold.crowded(self._place, came)

    def room(self) -> int:
        """See `Quota.room`."""
        return self._threshold.budget.tokens or self.budget.capacity

    def limits(self, pinned: Tensor, positions: Tensor, least: Tensor) -> Tensor | None:
        """See `Quota.limits`."""
        share = self._threshold.fitted(self._place)
        mean = torch.full(pinned.shape[:2], self.room(), device=positions.device)
        return mean if share is None else share.to(mean)
