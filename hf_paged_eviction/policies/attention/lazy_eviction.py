"""LazyEviction, arXiv 2506.15969."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import EvictionPolicy, ScoreContext, Statistics
from ..checks import check_between, check_count
from ..needs import Needs
from ..registry import register_policy


@register_policy("lazy_eviction")
@dataclass(frozen=True)
class LazyEviction(EvictionPolicy):
    r"""Keeps tokens that are likely to be needed again: active more recently than their longest pause so far.

    .. math:: s_t = 2 \sigma(-\text{age}_t / \text{pause}_t) + 2 \sigma(-\text{pause}_t - 1)

    A token is active when a query pays it more than `threshold` in any query head of the group. `age` is the number of
    tokens since its last activity, `pause` the longest gap between two activities, and `sigma` the logistic function. A
    token that was active once has no pause: it scores 1 while it is active and 0 afterwards. A token that was never
    active scores 0.

    As in arXiv 2506.15969, the cache decides every `lag` tokens, several blocks at a time, and the newest `lag` tokens
    (at most half of those held) are pinned, so that pauses can show. Nothing is scored between two decisions, as long
    as budgets are equal and at most one block of recent tokens is protected. Choose a budget well above `lag`;
    otherwise this is a sliding window.

    Args:
        threshold: attention that counts as activity; 5e-4 or 1e-4 in the paper, depending on the model.
        lag: number of tokens between two decisions, and of newest tokens that are pinned; about 175 in the paper, for
            answers of 8,000 tokens.

    Raises:
        ValueError: a parameter is out of range.
    """

    threshold: float = 1e-4
    lag: int = 32

    paper: ClassVar[str | None] = "2506.15969"

    def __post_init__(self) -> None:
        check_between("threshold", self.threshold, 0, 1)
        check_count("lag", self.lag)

    @property
    def needs(self) -> Needs:
        """Statistics: `active`, the position after the last active query (0 = none), and `pause`, the longest gap."""
        return Needs(decision_interval=self.lag, token_statistics=("active", "pause"))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        active = attention.weights.amax(2) > self.threshold  # [B, H, q, T]
        # The queries of a block come in the order of their places, which may begin in the middle of the block.
        order = attention.query_positions.argsort(dim=-1)
        moments = (attention.query_positions.gather(-1, order) + 1).float()[:, None, :, None]
        active = active.gather(2, order[:, None, :, None].expand_as(active))
        marks = torch.where(active, moments, 0.0)
        latest = torch.cat([statistics["active"][:, :, None], marks], dim=2).cummax(2).values
        before, last = latest[:, :, :-1], latest[:, :, -1]
        gaps = (marks - before).masked_fill(~active | (before == 0), 0.0)
        return {"active": last, "pause": torch.maximum(statistics["pause"], gaps.amax(2))}

    def score(self, context: ScoreContext) -> Tensor:
        active, pause = context.statistics["active"], context.statistics["pause"]
        age = (context.seen[:, None, None] - active).clamp_min(0)
        recurs = pause > 0
        returning = 2 * torch.sigmoid(-age / pause.where(recurs, 1.0)) + 2 * torch.sigmoid(-pause - 1)
        worth = returning.where(recurs, (age == 0).float()).masked_fill(active == 0, 0.0)
        lag = (context.valid.sum(-1, keepdim=True) // 2).clamp_max(self.lag)
        return worth.masked_fill(context.positions >= context.seen[:, None, None] - lag, float("inf"))
