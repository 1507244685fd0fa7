"""R-KV, arXiv 2505.24133."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import ScoreContext, Statistics
from ..checks import check_between, check_count, check_kernel
from ..needs import Needs
from ..redundancy import redundancy
from ..registry import register_policy
from .recent_window import RecentWindow


@register_policy("r_kv")
@dataclass(frozen=True)
class RKV(RecentWindow):
    r"""Keeps tokens that recent queries attend to and whose keys are not redundant; of near duplicates, the latest.

    .. math:: s_t = \lambda I_t - (1 - \lambda) R_t, \quad \lambda = \text{balance}

    `I` is the attention of the last `window` queries to the tokens before them: the largest logit over the query heads
    of the group, a softmax per query, the mean over the queries, and max-pooling over `kernel` neighbours. `R` is the
    softmax over tokens of the mean cosine similarity of a key to the other keys. In that mean each token ignores the
    latest of the keys that are more similar to it than `threshold`.

    All held tokens are compared with each other, so this is the most expensive policy. It keeps one number per token,
    KV head and query of the window. The tokens of the window are pinned, so the budget should be well above `window`.
    From arXiv 2505.24133, which evicts every 128 tokens; the cache evicts whenever a block is full.

    Args:
        balance: weight of the attention; 0.1 in the authors' readme, 0.07 in their code.
        window: number of observed queries.
        kernel: number of pooled tokens, odd.
        threshold: cosine similarity above which a key is a near duplicate.

    Raises:
        ValueError: a parameter is out of range.
    """

    balance: float = 0.1
    window: int = 8
    kernel: int = 7
    threshold: float = 0.5

    paper: ClassVar[str | None] = "2505.24133"

    def __post_init__(self) -> None:
        check_between("balance", self.balance, 0, 1)
        check_count("window", self.window, at_least=1)
        check_kernel("kernel", self.kernel)
        check_between("threshold", self.threshold, -1, 1)

    @property
    def needs(self) -> Needs:
        return Needs(absolute_noise=True, token_statistics=self._names, row_statistics=("newest",), window=self.window)

    @property
    def _names(self) -> tuple[str, ...]:
        """What each query of the window pays, by its position modulo `window`; zero where it is not known."""
        return tuple(f"query{at}" for at in range(self.window))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        positions = attention.query_positions
        before = statistics.get("newest", torch.full((len(positions),), -1.0, device=positions.device))
        places = torch.arange(self.window, device=positions.device)
        fits = (positions[:, :, None] % self.window == places) & attention.counts[:, :, None]
        last, at = positions[:, :, None].masked_fill(~fits, -1).max(1)  # [B, window]
        index = at[:, None, :, None].expand(-1, attention.queries.shape[1], -1, attention.queries.shape[-1])
        newest = replace(attention, queries=attention.queries.gather(2, index), query_positions=last)
        weights = newest.largest_weights()
        after = {"newest": torch.maximum(before, positions.amax(-1).float())}
        for place, name in enumerate(self._names):
            after[name] = weights[:, :, place].where((last[:, place] >= 0)[:, None, None], statistics[name])
        return after

    def attention(self, context: ScoreContext) -> Tensor:
        before = self.before(context)
        paid = torch.stack([context.statistics[name] * before for name in self._names])
        total = paid.sum(-1, keepdim=True)
        shares = (paid / total.clamp_min(1e-30)).sum(0) / (total > 0).sum(0).clamp_min(1)
        return self.pooled(shares, context, self.kernel, "max")

    def score(self, context: ScoreContext) -> Tensor:
        similar = redundancy(context.keys, context.positions, self.threshold)
        redundant = similar.masked_fill(~context.valid, float("-inf")).softmax(-1).nan_to_num(0.0)
        return self.with_window(self.balance * self.attention(context) - (1 - self.balance) * redundant, context)
