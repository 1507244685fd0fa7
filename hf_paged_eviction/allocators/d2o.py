"""The layer rule of D2O, arXiv 2406.13035."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention_rows import Attention
from ..policies import Statistics
from .base import LayerAllocator
from .registry import register_allocator


@register_allocator("d2o")
@dataclass(frozen=True)
class D2O(LayerAllocator):
    r"""Layers whose attention is spread evenly get more: `softmax(-variance)` over the layers.

    .. math::

        b_\ell \propto \exp(-\operatorname{var}_t r_{\ell,t}), \quad
        r_{\ell,t} \text{ attention received, scaled to } [0, 1]

    The variance is that of the attention each token receives from the whole prompt, summed over queries and scaled to
    [0, 1]. The published code leaves the first two layers and the last one uncompressed; here all share one total.
    """

    paper: ClassVar[str | None] = "2406.13035"

    @property
    def token_statistics(self) -> tuple[str, ...]:
        return ("received",)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"received": statistics["received"] + attention.weights.mean(2).sum(2)}

    def preference(self, statistics: Statistics, valid: Tensor) -> Tensor:
        received = statistics["received"].mean(1)
        valid = valid[:, 0]
        low = received.masked_fill(~valid, float("inf")).amin(-1, keepdim=True)
        high = received.masked_fill(~valid, float("-inf")).amax(-1, keepdim=True)
        scaled = ((received - low) / (high - low).clamp_min(1e-12)).masked_fill(~valid, 0)
        count = valid.sum(-1, keepdim=True).clamp_min(1)
        mean = scaled.sum(-1, keepdim=True) / count
        deviation = (scaled - mean).masked_fill(~valid, 0)
        variance: Tensor = deviation.square().sum(-1) / count[:, 0]
        return variance

    def weights(self, preferences: Tensor) -> Tensor:
        return (-preferences).softmax(-1)
