"""One threshold over all layers and KV heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..policies import EvictionPolicy
from ..ranking import DROP, KEEP
from ..table.budget import BlockBudget
from .base import BudgetAllocator
from .registry import register_allocator


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

    def settle(self, ranks: Sequence[Tensor], mean: BlockBudget, tokens: Tensor) -> list[Tensor]:
        """The shares in tokens, `[rows, sets]` int64 for each layer.

        Args:
            ranks: of the tokens that each layer could keep, `[rows, sets, n]`, see `certain_first`.
            mean: mean share.
            tokens: not used; a share never exceeds the number of ranked tokens but by what all sets get.
        """
        capacity, counts = mean.capacity, _among_best(ranks, mean.capacity)
        sets = sum(count.shape[1] for count in counts)
        most = torch.stack([count.amax(-1) for count in counts]).amax(0)[:, None]  # [rows, 1]
        spare = (capacity * sets - torch.cat(counts, dim=1).sum(-1, keepdim=True)).clamp_min(0) // sets
        return [torch.where(most <= capacity, capacity, count + spare) for count in counts]


def certain_first(ranks: Tensor, least: Tensor) -> Tensor:
    """Sort ranks `[rows, sets, n]`, highest first, and raise the first `least` `[rows]` of each set to `KEEP`, even if
    the set has fewer tokens."""
    missing = max(int(least.max()) - ranks.shape[-1], 0)
    ranks = pad(ranks.sort(dim=-1, descending=True).values, (0, missing), value=DROP)
    certain = torch.arange(ranks.shape[-1], device=ranks.device) < least[:, None, None]
    return ranks.masked_fill(certain, KEEP)


def check_common_unit(policy: EvictionPolicy) -> None:
    """Refuse policies whose scores cannot be compared across layers and heads.

    Raises:
        ValueError: with the way out.
    """
    if not policy.needs.common_unit:
        raise ValueError(
            f"allocator='global' compares the scores of all layers and heads, and those of {policy.label!r} have no "
            "common unit. Use a policy whose scores have one: 'calibrated' (paged-eviction prepare), "
            "'self_calibrated', 'expected_attention' or 'kvzip'; or an allocator that compares less: 'ada_kv', "
            "'uniform'."
        )


def _among_best(ranks: Sequence[Tensor], mean: int) -> list[Tensor]:
    """`[rows, sets]` per layer: number of tokens with these ranks `[rows, sets, n]` that are among the best of all
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
