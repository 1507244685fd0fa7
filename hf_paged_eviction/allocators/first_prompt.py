"""Shares of KV heads from the attention of the first prompt itself."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention.looked_at import looked_at
from ..attention.weights import Attention
from ..policies import Statistics
from ..policies.checks import check_between, check_count, check_positive
from .base import LayerAllocator
from .registry import register_allocator

#: Added to the tokens that a head looks back at, so that none counts for nothing.
_AT_LEAST = 4


@register_allocator("first_prompt")
@dataclass(frozen=True)
class FirstPrompt(LayerAllocator):
    r"""Gives more to KV heads that look far back, measured on the first prompt that overflows the budget.

    .. math:: b_{\ell,h} \propto (4 + n_{\ell,h})^\gamma, \quad
        n_{\ell,h} = \bigl| \{ t : \max_{q \ge t + d} a^{\ell,h}_{q,t} \ge \theta \} \bigr|

    `n` is the number of tokens to which one of the last `observed` queries, at least `distance` tokens later, pays a
    weight of `threshold` or more (averaged over the query heads that share the KV head). `gamma` is `power`. Which
    heads look far back depends on the model more than on the text, so one prompt comes close to a table that was
    learned beforehand (`heads`), and no file is needed. The shares stay for the rest of the text. From no paper.

    Args:
        threshold: attention weight from which a token counts.
        power: exponent of the counts; the larger, the more shares differ.
        observed: number of observed queries.
        distance: queries nearer to a token than this do not count, because the token is in the cache anyway.

    Raises:
        ValueError: a parameter is out of range.
    """

    per_head: ClassVar[bool] = True
    once: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = False
    token_statistics: ClassVar[tuple[str, ...]] = ("looked_at",)

    threshold: float = 0.01
    power: float = 1.5
    observed: int = 256
    distance: int = 64

    def __post_init__(self) -> None:
        check_between("threshold", self.threshold, 0, 1)
        check_positive("power", self.power)
        check_count("observed", self.observed, at_least=1)
        check_count("distance", self.distance)

    @property
    def window(self) -> int | None:
        return self.observed

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        looked = looked_at(attention, self.threshold, self.distance)
        return {"looked_at": torch.maximum(statistics["looked_at"], looked.float())}

    def preference(self, statistics: Statistics, positions: Tensor) -> Tensor:
        return (statistics["looked_at"] * (positions >= 0)).sum(-1) + _AT_LEAST

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        return preferences.double() ** self.power
