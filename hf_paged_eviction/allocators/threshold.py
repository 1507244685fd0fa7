"""One threshold over all layers and KV heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..integration.heads import LocalHeads
from ..policies import EvictionPolicy
from ..ranking import DROP, KEEP
from ..table.budget import BlockBudget
from .base import BudgetAllocator
from .registry import register_allocator
from .split import BudgetSplit, LayerBudget, refuse_processes


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

    A forward of several tokens that does not fit decides once, after its last layer: until then every layer holds all
    of its tokens. Single tokens then evict within each head, so the budgets of an endless text are those of its prompt;
    `shrink` and the next forward of several tokens decide anew.
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
    """Gives each row and KV head a budget, by one threshold over the tokens of all layers."""

    unequal = settles = compares = has_state = True

    def __init__(self, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._ranks: dict[int, Tensor] = {}  # by place, [B, sets, tokens]; empty between the decisions

    # ---- what layers ask ------------------------------------------------------------------------------------------

    def check(self, layer: LayerBudget, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `BudgetSplit.check`."""
        refuse_processes("global", "all layers", kv_heads, local_heads)

    def for_policy(self, layer: LayerBudget) -> int | Tensor:
        """See `LayerBudget.for_policy`."""
        return self.mean.tokens or layer.now.capacity

    def rank(self, layer: LayerBudget, ranks: Tensor, min_tokens: Tensor) -> None:
        """See `BudgetSplit.rank`."""
        if self.mean.tokens is None:
            self.begin(layer.now)
        min_tokens = min_tokens.clamp_max(self.mean.capacity)
        missing = max(int(min_tokens.max()) - ranks.shape[-1], 0)
        ranks = pad(ranks.sort(dim=-1, descending=True).values, (0, missing), value=DROP)
        certain = torch.arange(ranks.shape[-1], device=ranks.device) < min_tokens[:, None, None]
        self._ranks[layer.place] = ranks.masked_fill(certain, KEEP)

    def settle(self, real: Tensor) -> None:
        """See `BudgetSplit.settle`."""
        mean, ranks, self._ranks = self.mean.capacity, [self._ranks[place] for place in range(self.layers)], {}
        counts = _among_best([layer_ranks.to(real.device) for layer_ranks in ranks], mean)
        sets = sum(count.shape[1] for count in counts)
        most = torch.stack([count.amax(-1) for count in counts]).amax(0)[:, None]  # [B, 1]
        spare = (mean * sets - torch.cat(counts, dim=1).sum(-1, keepdim=True)).clamp_min(0) // sets
        for place, count in enumerate(counts):
            self._tokens[place] = torch.where(most <= mean, mean, count + spare).to(ranks[place].device)

    def divide_anew(self, real: Tensor) -> None:
        """See `BudgetSplit.divide_anew`."""
        self.settle(real)

    def max_tokens(self, layer: LayerBudget, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """See `BudgetSplit.max_tokens`."""
        tokens, mean = self.tokens(layer.place), self.mean.tokens or layer.now.capacity
        if tokens is None:
            return torch.full(pinned.shape[:2], mean, device=positions.device)
        return tokens.to(positions.device)

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def clear(self) -> None:
        """See `BudgetSplit.clear`."""
        super().clear()
        self._ranks = {}

    def _mean(self, total: int, sets: int) -> int:
        size = self.mean.block_size
        return -(-total // (sets * size)) * size


def _among_best(ranks: list[Tensor], mean: int) -> list[Tensor]:
    """`[B, sets]` per layer: number of tokens with these ranks `[B, sets, tokens]` that are among the best of all
    layers, of which `mean` for each set may stay."""
    flat = torch.cat([layer_ranks.flatten(1) for layer_ranks in ranks], dim=1)
    total = mean * sum(layer_ranks.shape[1] for layer_ranks in ranks)
    among_best = flat > DROP
    if flat.shape[1] > total:
        lowest = flat.kthvalue(flat.shape[1] - total + 1, dim=-1, keepdim=True).values
        above, equal = flat > lowest, (flat == lowest) & among_best
        among_best = above | (equal & (equal.cumsum(-1) <= total - above.sum(-1, keepdim=True)))
    parts = among_best.split([layer_ranks[0].numel() for layer_ranks in ranks], dim=1)
    return [part.view(layer_ranks.shape).sum(-1) for part, layer_ranks in zip(parts, ranks, strict=True)]
