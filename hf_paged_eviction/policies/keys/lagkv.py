"""LagKV, arXiv 2504.04704."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base import EvictionPolicy, ScoreContext
from ..checks import check_between, check_count
from ..needs import Needs
from ..registry import register_policy

#: The tokens that a token competes with: those of its part, or all.
Scope = Literal["part", "all"]
#: Softmaxes of a part differ by at least so much of their mean, or they are equal.
_RESOLUTION = 1 / 4096


@register_policy("lagkv")
@dataclass(frozen=True)
class LagKV(EvictionPolicy):
    r"""Keeps the tokens whose keys and values differ most from the next `lag` tokens of the text.

    .. math::

        s_t = \operatorname{rank}_{\text{part}} \Bigl( \operatorname{softmax}_{\text{part}} \sigma(k_t)
        + w \operatorname{softmax}_{\text{part}} \sigma(v_t) \Bigr) / \text{lag}, \quad
        \sigma(x_t) = \operatorname{std}_c \frac{x_{t,c} - \min_u x_{u,c}}{\max_u x_{u,c} - \min_u x_{u,c}},
        \quad u \text{ in the next part}

    The first `n_sink` tokens are pinned. The other held tokens are cut into parts of `lag` tokens, in the order of the
    text. Each channel `c` of a token is scaled to the range (minimum to maximum) of that channel in the next part;
    `sigma` is the standard deviation over the channels. `w` is `value_weight`. As in arXiv 2504.04704, tokens compete
    within their part: the score is the rank in the part, so each part keeps the same share of its tokens.

    The last full part and the tokens after it have no full next part. They get the score 1, above all others, so choose
    `lag` well below the budget. If they alone exceed the budget, the newest of them stay. A channel that is constant in
    the next part counts as 0.

    `scope="all"` is an addition of this package: the deviations themselves are the scores, and they are compared across
    parts. Use it if `lag` is at most the block size, because then all blocks have the same mean rank within their part.
    `lagkv(lag=16, scope=all)` compares each block with the next one.

    Args:
        lag: tokens in a part.
        n_sink: number of first tokens of the row that are pinned.
        value_weight: weight of the value's score.
        scope: "part" (as published) or "all".

    Raises:
        ValueError: a parameter is out of range.
    """

    lag: int = 128
    n_sink: int = 4
    value_weight: float = 1.0
    scope: Scope = "part"

    paper: ClassVar[str | None] = "2504.04704"
    needs = Needs(absolute_noise=True, supports_mla=False)

    def __post_init__(self) -> None:
        check_count("lag", self.lag, at_least=1)
        check_count("n_sink", self.n_sink)
        check_between("value_weight", self.value_weight, 0)
        if self.scope not in ("part", "all"):
            raise ValueError(f'scope must be "part" or "all", got {self.scope!r}.')

    def score(self, context: ScoreContext) -> Tensor:
        sinks = context.valid & (context.positions < self.n_sink)
        cut = context.valid & ~sinks
        order = context.positions.masked_fill(~cut, torch.iinfo(torch.int64).max).argsort(dim=-1)
        count = cut.sum(-1, keepdim=True)  # the first `count` places of the order are cut into parts
        keys, values = self._deviation(context.keys, order), self._deviation(context.values, order)
        if self.scope == "all":
            scores, top = keys + self.value_weight * values, float("inf")
        else:
            scores, top = _rank(keys.softmax(-1) + self.value_weight * values.softmax(-1)), 1.0
        scores = scores.flatten(2)[..., : order.shape[-1]]
        place = torch.arange(order.shape[-1], device=order.device)
        judged = (place // self.lag + 2) * self.lag <= count
        scores = torch.zeros_like(scores).scatter(-1, order, scores.masked_fill(~judged, top))
        return scores.masked_fill(sinks, float("inf"))

    def _deviation(self, states: Tensor, order: Tensor) -> Tensor:
        """`[B, H, parts, lag]` in the order of the text; anything where the next part is not full."""
        tokens = order.shape[-1]
        parts = -(-tokens // self.lag)
        ordered = states.float().gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
        ordered = pad(ordered, (0, 0, 0, parts * self.lag - tokens)).unflatten(2, (parts, self.lag))
        low, high = ordered.amin(3, keepdim=True).roll(-1, 2), ordered.amax(3, keepdim=True).roll(-1, 2)
        width = high - low
        scaled = torch.where(width > 0, (ordered - low) / width.where(width > 0, 1.0), 0.0)
        return scaled.std(-1)


def _rank(shares: Tensor) -> Tensor:
    """Place of each token in its part `[..., lag]`, from 0 to below 1; of equal tokens the later is higher."""
    lag = shares.shape[-1]
    # Rounded, so that noise in the last bit does not tell equal tokens apart.
    levels = (shares.nan_to_num(0.0) * (lag / _RESOLUTION)).round()
    return levels.argsort(dim=-1, stable=True).argsort(dim=-1) / lag
