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
    r"""How likely the token comes back: high if it was active less long ago than its longest pause so far.

    .. math:: s_t = 2 \sigma(-\text{age}_t / \text{pause}_t) + 2 \sigma(-\text{pause}_t - 1)

    Active means a query head of the group pays more than `threshold`. With `age` since the last activity and `pause`
    the longest gap between two, the score is `2 sigmoid(-age / pause) + 2 sigmoid(-pause - 1)`; a token that was active
    once has no pause, and scores 1 while it is active and 0 after. A token that never was scores 0.

    As in the paper, victims are chosen every `lag` tokens only, as many blocks together, and the newest `lag` tokens
    are safe (at most half of those held), so that pauses can show. They are overwritten one after the other, and in
    between nothing is scored (with equal shares and no more than a block of recent tokens protected). With a
    budget near `lag` that is a sliding window: choose it well below.

    Args:
        threshold: attention that counts as activity; 5e-4 and 1e-4 in the paper, by model.
        lag: tokens between decisions, and newest tokens that are safe; about 175 in the paper, for answers of 8,000
            tokens.

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
        """Statistics: position after the last active query, 0 = never; longest gap."""
        return Needs(decision_interval=self.lag, token_statistics=("active", "pause"))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        active = attention.weights.amax(2) > self.threshold  # [B, H, q, T]
        # The queries of a block come in the order of their places, which may begin in the middle of the block.
        order = attention.query_positions.argsort(dim=-1)
        moments = (attention.query_positions.gather(-1, order) + 1).float()[:, None, :, None]
        active = active.gather(2, order[:, None, :, None].expand_as(active))
        marks = torch.where(active, moments, 0.0)
        known = torch.cat([statistics["active"][:, :, None], marks], dim=2).cummax(2).values
        before, last = known[:, :, :-1], known[:, :, -1]
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
