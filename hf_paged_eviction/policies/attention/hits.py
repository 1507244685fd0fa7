"""Attention as yes or no: which queries used a token, when last (LRU, LRA, Scissorhands), how often (LFU, LFA)."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import EvictionPolicy, ScoreContext, Statistics
from ..checks import check_count
from ..needs import Needs
from ..registry import register_policy

#: Weights closer than this, relatively, are equal: the last bits must not decide.
_CLOSE = 1e-5


def _among_the_top(attention: Attention, count: int) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: one of the `count` largest weights of a query head of the group."""
    weights = attention.weights
    least = weights.topk(min(count, weights.shape[-1]), dim=-1).values[..., -1:]
    return ((weights >= least * (1 - _CLOSE)) & (weights > 0)).any(2)


def _above_uniform(attention: Attention) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: a query head pays more than if it paid all tokens it sees the same."""
    seen = attention.visible.sum(-1, keepdim=True)
    return (attention.weights * seen > 1 + _CLOSE).any(2)


def _above_percentile(attention: Attention, percentile: int) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: among the top `100 - percentile` percent of a query head's weights."""
    ordered = attention.weights.sort(dim=-1, descending=True).values
    place = attention.visible.sum(-1, keepdim=True) * (100 - percentile) // 100
    least = ordered.gather(-1, place.expand(*ordered.shape[:-1], 1))
    return (attention.weights > least * (1 + _CLOSE)).any(2)


class LastHit(EvictionPolicy):
    """Scores by the time since the last query that used the token."""

    @abstractmethod
    def hits(self, attention: Attention) -> Tensor:
        """`[batch, kv_heads, q, tokens]` bool, which queries use which tokens."""

    @property
    def needs(self) -> Needs:
        return Needs(token_statistics=("used",))  # position after the last query that used it; 0 = never

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        after = (attention.query_positions + 1)[:, None, :, None]
        used = torch.where(self.hits(attention), after, 0).amax(2)
        return {"used": torch.maximum(statistics["used"], used.float())}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["used"] - context.seen[:, None, None]


class HitRate(EvictionPolicy):
    """Scores by the share of queries that used the token, among those that could see it."""

    needs = Needs(token_statistics=("uses",))

    @abstractmethod
    def hits(self, attention: Attention) -> Tensor:
        """`[batch, kv_heads, q, tokens]` bool, which queries use which tokens."""

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"uses": statistics["uses"] + self.hits(attention).sum(2)}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["uses"] / context.queries.clamp_min(1)


@dataclass(frozen=True)
class _TopUsed:
    """A query uses the `top` tokens that it attends to most."""

    top: int = 8

    def __post_init__(self) -> None:
        check_count("top", self.top, at_least=1)

    def hits(self, attention: Attention) -> Tensor:
        return _among_the_top(attention, self.top)


@register_policy("lru")
@dataclass(frozen=True)
class LRU(_TopUsed, LastHit):
    r"""Evicts the least recently used token. A query uses its `top` most attended tokens.

    .. math:: s_t = -\min \{ \text{now} - q : t \text{ is among the top of } a^h_q \text{ for some } h \}

    The score is minus the number of tokens since the last query `q` that used the token in any query head `h` of the
    group. This is the textbook rule of caches; no paper defines "used" for tokens, so the definition is ours.

    Args:
        top: number of tokens that a query uses in one query head.

    Raises:
        ValueError: `top` is not a whole number above 0.
    """


@register_policy("lfu")
@dataclass(frozen=True)
class LFU(_TopUsed, HitRate):
    r"""Evicts the least frequently used token. A query uses its `top` most attended tokens.

    .. math:: s_t = \frac{1}{n_t} |\{ q : t \text{ is among the top of } a^h_q \text{ for some } h \}|

    The score is the share of queries that used the token in any query head `h` of the group, among the `n` queries that
    could see it. (Their number would only grow with the token's age.) This is the textbook rule of caches; no paper
    defines "used" for tokens, so the definition is ours.

    Args:
        top: number of tokens that a query uses in one query head.

    Raises:
        ValueError: `top` is not a whole number above 0.
    """


@register_policy("lra")
@dataclass(frozen=True)
class LRA(LastHit):
    r"""Evicts the least recently attended token.

    .. math:: s_t = -\min \{ \text{now} - q : a^h_{q,t} > 1 / |a^h_q| \text{ for some } h \}

    The score is minus the number of tokens since the last query `q` that attended to the token. A query attends to a
    token if, in any query head `h` of the group, the token gets more than an even share of the query's attention: 1/n
    for n visible tokens. arXiv 2401.04881 names the rule without a formula, so this definition is ours. The paper
    decides once per chunk, the cache whenever a block is full.
    """

    paper: ClassVar[str | None] = "2401.04881"

    def hits(self, attention: Attention) -> Tensor:
        return _above_uniform(attention)


@register_policy("lfa")
@dataclass(frozen=True)
class LFA(HitRate):
    r"""Evicts the least frequently attended token.

    .. math:: s_t = \frac{1}{n_t} |\{ q : a^h_{q,t} > 1 / |a^h_q| \text{ for some } h \}|

    The score is the share of queries that attended to the token, among the `n` queries that could see it. A query
    attends to a token if, in any query head `h` of the group, the token gets more than an even share of the query's
    attention: 1/n for n visible tokens. arXiv 2401.04881 names the rule without a formula, so this definition is ours.
    The paper decides once per chunk, the cache whenever a block is full.
    """

    paper: ClassVar[str | None] = "2401.04881"

    def hits(self, attention: Attention) -> Tensor:
        return _above_uniform(attention)


@register_policy("scissorhands")
@dataclass(frozen=True)
class Scissorhands(LastHit):
    r"""Evicts the token that was least recently among the most attended tenth of a query's tokens.

    .. math:: s_t = -\min \{ \text{now} - q : a^h_{q,t} > P_{90}(a^h_q) \text{ for some } h \}

    The score is minus the number of tokens since the last query `q` that, in any query head `h` of the group, paid the
    token more than `percentile` percent of the tokens it sees. The authors' code (arXiv 2305.17118) only asks whether
    one of the last few queries did; the order among the tokens that pass is ours.

    Args:
        window: number of observed queries at the end of a prompt. The paper's value is not known to us.
        percentile: percentile of a query head's weights over the tokens it sees, at most 99.

    Raises:
        ValueError: a parameter is out of range.
    """

    window: int = 64
    percentile: int = 90

    paper: ClassVar[str | None] = "2305.17118"

    def __post_init__(self) -> None:
        check_count("window", self.window, at_least=1)
        check_count("percentile", self.percentile, at_least=1)
        if self.percentile > 99:
            raise ValueError(f"percentile must be at most 99, got {self.percentile!r}.")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, window=self.window)

    def hits(self, attention: Attention) -> Tensor:
        return _above_percentile(attention, self.percentile)
