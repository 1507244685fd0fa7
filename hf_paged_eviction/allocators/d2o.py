"""The layer rule of D2O, arXiv 2406.13035."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention.weights import Attention
from ..policies import Statistics
from .base import LayerAllocator
from .registry import register_allocator


@register_allocator("d2o")
@dataclass(frozen=True)
class D2O(LayerAllocator):
    r"""Gives more to layers in which few heads concentrate their attention: `softmax(-v)` over the layers.

    .. math::

        b_\ell \propto \exp(-v_\ell), \quad v_\ell = \operatorname{mean}_h \hat\sigma^2_{\ell,h}, \quad
        \sigma^2_{\ell,h} = \operatorname{var}_t \sum_q a^h_{q,t}

    The variance is taken over tokens, of the attention that each token receives from the whole prompt in a query head
    `h`. It is scaled to [0, 1] over the heads of the layer, as in the authors' code, so shares differ by a factor of e
    at most. That code leaves the first two layers and the last one uncompressed; here all layers share one total. From
    arXiv 2406.13035.
    """

    paper: ClassVar[str | None] = "2406.13035"
    token_statistics: ClassVar[tuple[str, ...]] = ("received",)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"received": statistics["received"] + attention.weights.sum(3)}  # [B, H, G, T]

    def preference(self, statistics: Statistics, positions: Tensor) -> Tensor:
        valid = (positions >= 0)[:, :, None]
        received = statistics["received"] * valid
        count = valid.sum(-1, keepdim=True).clamp_min(1)
        deviation = (received - received.sum(-1, keepdim=True) / count) * valid
        variance = (deviation.square().sum(-1) / (count[..., 0] - 1).clamp_min(1)).flatten(1)  # [B, query heads]
        low, high = variance.amin(-1, keepdim=True), variance.amax(-1, keepdim=True)
        return ((variance - low) / (high - low + 1e-6)).mean(-1)

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        return (-preferences).softmax(-1)
