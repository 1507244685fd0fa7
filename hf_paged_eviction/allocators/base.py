"""What shares the budget out among layers and KV heads."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention.weights import Attention
from ..naming import Named
from ..policies import Statistics


class BudgetAllocator(Named):
    """Decides how many tokens each layer, or each KV head, may hold. The total is that of equal shares.

    Shares are whole blocks. A share is never below the smallest legal budget, nor above what the row has to hold while
    other shares can use the rest. Like a policy, an allocator holds parameters only.

    Class attributes:
        name: set by `register_allocator`.
        paper: arXiv id, or None.
        per_head: whether the KV heads of a layer may hold different numbers of tokens; needs heads="separate".
    """

    per_head: ClassVar[bool] = False

    def check_model(self, config: Any) -> None:
        """Check that this allocator can serve a model.

        Args:
            config: `model.config`.

        Raises:
            ValueError: it cannot; the message names the difference.
        """


class FixedAllocator(BudgetAllocator, ABC):
    """Shares that depend only on the index of the layer and on how many tokens the row has to hold.

    Class attributes:
        foreseen: length of the text, in budgets, that is assumed when single tokens have filled the budget; None =
            heads hold equally many tokens until several tokens come.
    """

    foreseen: ClassVar[int | None] = None

    @abstractmethod
    def weights(self, layers: int, budget: int) -> list[float]:
        """One number per layer, proportional to its share; `budget` is the mean share in tokens."""

    def shares(self, layers: int, budget: int, tokens: Tensor) -> list[Tensor]:
        """Numbers proportional to the shares, `[rows, 1 or kv_heads]` for each layer.

        Args:
            layers: how many there are.
            budget: mean share in tokens.
            tokens: `[rows]` int64, how many each row has to hold.
        """
        return [torch.full((len(tokens), 1), weight) for weight in self.weights(layers, budget)]


class LayerAllocator(BudgetAllocator, ABC):
    """Shares of layers that each row's prompt decides, layer by layer during the forward.

    After each layer's attention, the total is divided among the layers so far; earlier layers give up tokens.

    Class attributes:
        once: True if the first prompt that overflows decides for the rest of the text; False if each one decides again.
    """

    once: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        """How many of the last queries of a forward are looked at; None = all."""
        return None

    @property
    @abstractmethod
    def token_statistics(self) -> tuple[str, ...]:
        """Names of the numbers kept while a forward's queries are looked at."""

    @abstractmethod
    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        """As `EvictionPolicy.observe`; the statistics live for one forward.

        They start as a zero without dimensions and become what is returned, of any shape `[batch, kv_heads, ...]`.
        """

    @abstractmethod
    def preference(self, statistics: Statistics, positions: Tensor) -> Tensor:
        """What a layer's attention says of it, `[batch]` float32; of each KV head, `[batch, kv_heads]`, if `per_head`.

        Args:
            statistics: of all KV heads, in dimension 1.
            positions: `[batch, kv_heads, tokens]` int64, -1 for pads.
        """

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        """Preferences `[batch, layers]`, or `[batch, heads of all layers]`, as numbers proportional to the shares.

        Args:
            budget: mean share of a layer, or of a head, in tokens.
        """
        return preferences


class HeadAllocator(BudgetAllocator, ABC):
    """Shares among the KV heads of a layer, decided by the scores of its tokens."""

    per_head: ClassVar[bool] = True

    @abstractmethod
    def weights(self, scores: Tensor, budget: int) -> Tensor:
        """Numbers `[batch, kv_heads]` proportional to the shares.

        Args:
            scores: `[batch, kv_heads, tokens]` float32, high = keep; inf = protected, -inf = a pad.
            budget: mean share of a head in tokens.
        """
