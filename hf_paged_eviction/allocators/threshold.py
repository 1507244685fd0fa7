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
from .registry import register_allocator
from .split import BudgetSplit, LayerBudget, refuse_processes

#: One part in so many of the budget may be held beyond it while a forward walks through the layers. To give tokens up
#: rewrites all slots of all layers so far. 16 layers with a budget of 256 tokens, read in chunks of 32, are rewritten
#: 694 times for 1,024 tokens; 1,028 times without anything beyond, and 684 times with a tenth.
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
    """Refuse policies whose scores cannot be compared across layers and heads.

    Raises:
        ValueError: with the way out.
    """
    if not policy.needs.common_unit:
        raise ValueError(
            f"allocator='global' compares the scores of all layers and heads, and those of {policy.label!r} have no "
            "common unit. Use a policy whose scores have one: 'calibrated:FILE' (paged-eviction prepare), "
            "'self_calibrated', 'expected_attention' or 'kvzip'; or an allocator that compares less: 'ada_kv', "
            "'uniform'."
        )


class ThresholdSplit(BudgetSplit):
    """Gives each row and KV head a budget, by one threshold over the tokens of all layers.

    It remembers the ranks of the tokens, sorted and without their places: 8 bytes per token and KV head.

    Args:
        mean: budget of a head.
    """

    unequal = among_layers = compares = True

    def __init__(self, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._ranks: dict[int, Tensor] = {}  # by place, [B, sets, tokens], the best first
        self._fitted: dict[int, Tensor] = {}  # by place, [B, sets] tokens, what the layer was brought to last
        self._decided = True

    # ---- what layers ask ------------------------------------------------------------------------------------------

    def check(self, layer: LayerBudget, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `BudgetSplit.check`."""
        refuse_processes("global", "all layers", kv_heads, local_heads)

    def has_ranks(self, layer: LayerBudget) -> bool:
        """See `BudgetSplit.has_ranks`."""
        return layer.scores is not None and layer.place in self._ranks

    def add_ranks(self, layer: LayerBudget, ranks: Tensor, min_tokens: Tensor) -> None:
        """See `BudgetSplit.add_ranks`."""
        if self.mean.tokens is None:
            self.begin(layer.now)
        min_tokens = min_tokens.clamp_max(self.mean.capacity)
        missing = max(int(min_tokens.max()) - ranks.shape[-1], 0)
        ranks = pad(ranks.sort(dim=-1, descending=True).values, (0, missing), value=DROP)
        certain = torch.arange(ranks.shape[-1], device=ranks.device) < min_tokens[:, None, None]
        self._ranks[layer.place] = ranks.masked_fill(certain, KEEP)
        self._decided = False

    def forget(self, place: int) -> None:
        """See `BudgetSplit.forget`."""
        for by_place in (self._ranks, self._tokens, self._fitted):
            by_place.pop(place, None)

    def tokens(self, place: int) -> Tensor | None:
        """See `BudgetSplit.tokens`. The shares are computed on access."""
        if not self._decided:
            self._decide()
        return super().tokens(place)

    def for_policy(self, layer: LayerBudget) -> int | Tensor:
        """See `LayerBudget.for_policy`."""
        return self.mean.tokens or layer.now.capacity

    def max_tokens(self, layer: LayerBudget, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """See `BudgetSplit.max_tokens`."""
        tokens, mean = self.tokens(layer.place), self.mean.tokens or layer.now.capacity
        if tokens is None:
            return torch.full(pinned.shape[:2], mean, device=positions.device)
        self._fitted[layer.place] = tokens
        return tokens.to(positions.device)

    def exceeds(self, layer: LayerBudget, new: int) -> bool:
        """See `BudgetSplit.exceeds`: True after the last layer, or when the layers so far hold too much."""
        place = layer.place
        if place == self.layers - 1:
            return True
        device, sets = self._tokens[place].device, self._tokens[place].shape[1]
        through = [(at, held) for at, held in self._fitted.items() if at <= place]
        much = [(held - self._tokens[at].to(held.device)).sum(-1) for at, held in through]
        surplus = torch.stack([tokens.to(device) for tokens in much]).sum(0)  # [B]
        return int(surplus.amax()) > max(new * sets, self.mean.capacity * self.layers * sets // _SPARE)

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """See `BudgetSplit.protect`. Layers call `add_ranks` again."""
        super().protect(spans)
        self._ask_anew()

    def shrink(self, mean: BlockBudget) -> None:
        """See `BudgetSplit.shrink`. Layers call `add_ranks` again: their last call may have counted room for single
        tokens, which the new budget does not have."""
        super().shrink(mean)
        self._ask_anew()

    def _ask_anew(self) -> None:
        """Layers offer again what they hold."""
        self._ranks, self._decided = {}, True

    def _decide(self) -> None:
        places, mean = sorted(self._ranks), self.mean.capacity
        device = self._ranks[places[0]].device
        counts = self._above(places, device)
        sets = sum(count.shape[1] for count in counts)
        most = torch.stack([count.amax(-1) for count in counts]).amax(0)[:, None]  # [B, 1]
        spare = torch.zeros_like(most)
        if len(places) == self.layers:  # the others have not said what they need
            spare = (mean * sets - torch.cat(counts, dim=1).sum(-1, keepdim=True)).clamp_min(0) // sets
        for place, count in zip(places, counts, strict=True):
            share = torch.where(most <= mean, mean, count + spare)
            offered = self._ranks[place]
            beyond = torch.arange(offered.shape[-1], device=device) >= share.to(offered.device)[..., None]
            self._ranks[place] = offered.masked_fill(beyond, DROP)[..., : int(share.max())]
            self._tokens[place] = share.to(offered.device)
        self._decided = True

    def _above(self, places: list[int], device: torch.device) -> list[Tensor]:
        """`[B, sets]` per place: number of tokens of the last `add_ranks` that are among the best of all layers."""
        offered = [self._ranks[place].to(device) for place in places]
        ranks = torch.cat([layer_ranks.flatten(1) for layer_ranks in offered], dim=1)
        sets = [layer_ranks.shape[1] for layer_ranks in offered]
        total = self.mean.capacity * (sum(sets) + (self.layers - len(places)) * sets[-1])
        among_best = ranks > DROP
        if ranks.shape[1] > total:
            lowest = ranks.kthvalue(ranks.shape[1] - total + 1, dim=-1, keepdim=True).values
            above, equal = ranks > lowest, (ranks == lowest) & among_best
            among_best = above | (equal & (equal.cumsum(-1) <= total - above.sum(-1, keepdim=True)))
        parts = among_best.split([layer_ranks[0].numel() for layer_ranks in offered], dim=1)
        return [part.view(layer_ranks.shape).sum(-1) for part, layer_ranks in zip(parts, offered, strict=True)]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `BudgetSplit.map_rows`. Layers call `add_ranks` again."""
        super().map_rows(change)
        self._fitted = {place: change(share) for place, share in self._fitted.items()}
        self._ask_anew()

    def clear(self) -> None:
        """See `BudgetSplit.clear`."""
        super().clear()
        self._fitted = {}
        self._ask_anew()

    def load_state(self, saved: SavedState, rows: int) -> None:
        """See `BudgetSplit.load_state`."""
        super().load_state(saved, rows)
        self._fitted = dict(self._tokens)

    def _mean(self, total: int, sets: int) -> int:
        size = self.mean.block_size
        return -(-total // (sets * size)) * size
