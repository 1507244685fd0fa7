"""LagKV, arXiv 2504.04704."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import EvictionPolicy, ScoreContext
from .checks import check_between, check_count
from .registry import register_policy


@register_policy("lagkv")
@dataclass(frozen=True)
class LagKV(EvictionPolicy):
    r"""How unevenly a key and a value lie in the range of those that come `lag` tokens later.

    .. math::

        s_t = \operatorname{std}_c \frac{k_{t,c} - \min_u k_{u,c}}{\max_u k_{u,c} - \min_u k_{u,c}}
        + w \operatorname{std}_c \frac{v_{t,c} - \min_u v_{u,c}}{\max_u v_{u,c} - \min_u v_{u,c}},
        \quad u \text{ in the next part}

    Tokens held are cut into parts of `lag` in the order of the text. In each channel a token is scaled to the range
    (minimum to maximum) of the next part; the score is the standard deviation over channels, of the key plus
    `value_weight` times that of the value. The last part and what remains behind it have nothing to be compared with
    and are safe. A channel that is constant in the next part says nothing and counts as 0.

    The authors take a softmax inside each part and keep the same share of each. Here the raw deviations are compared
    across parts: where parts are blocks, all blocks' softmaxes would have the same mean.

    Args:
        lag: tokens in a part. 128 to 1024 elsewhere; ours is the default block, so that one block judges the last.
        value_weight: weight of the value's score.

    Raises:
        ValueError: a parameter is out of range.
    """

    lag: int = 16
    value_weight: float = 1.0

    paper: ClassVar[str | None] = "2504.04704"
    absolute_noise: ClassVar[bool] = True
    supports_mla: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("lag", self.lag, at_least=1)
        check_between("value_weight", self.value_weight, 0)

    def score(self, context: ScoreContext) -> Tensor:
        order = context.positions.masked_fill(~context.valid, torch.iinfo(torch.int64).max).argsort(dim=-1)
        count = context.valid.sum(-1, keepdim=True)  # the first `count` places of the order are real
        deviation = self._deviation(context.keys, order, count)
        deviation = deviation + self.value_weight * self._deviation(context.values, order, count)
        place = torch.arange(order.shape[-1], device=order.device)
        judged = (place // self.lag + 2) * self.lag <= count
        deviation = deviation.masked_fill(~judged, float("inf"))
        return torch.zeros_like(deviation).scatter(-1, order, deviation)

    def _deviation(self, states: Tensor, order: Tensor, count: Tensor) -> Tensor:
        """`[B, H, T]` in the order of the text; anything where the next part is not full."""
        tokens = order.shape[-1]
        parts = -(-tokens // self.lag)
        ordered = states.float().gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
        ordered = torch.nn.functional.pad(ordered, (0, 0, 0, parts * self.lag - tokens))
        ordered = ordered.unflatten(2, (parts, self.lag))  # [B, H, N, lag, D]
        low, high = ordered.amin(3, keepdim=True).roll(-1, 2), ordered.amax(3, keepdim=True).roll(-1, 2)
        width = high - low
        scaled = torch.where(width > 0, (ordered - low) / width.where(width > 0, 1.0), 0.0)
        return scaled.std(-1).flatten(2)[..., :tokens]
