"""What shares the budget out among layers and KV heads."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention.weights import Attention
from ..naming import Named
from ..policies import Statistics


class BudgetAllocator(Named):
    """Says how many tokens each layer, or each KV head, may hold. The total is that of equal shares.

    Whole blocks are shared out; a share is never below the smallest legal budget nor, as long as others can use it,
    above what the row has to hold. Like a policy, an allocator holds parameters only.

    Class attributes:
        name: set by `register_allocator`.
        paper: arXiv id, or None.
        per_head: whether the KV heads of a layer may hold different numbers of tokens; needs heads="separate".
    """

    per_head: ClassVar[bool] = False

    def check_model(self, config: Any) -> None:
        """Refuse a model that this allocator was not made for.

        Args:
            config: `model.config`.

        Raises:
            ValueError: with what differs.
        """


class FixedAllocator(BudgetAllocator, ABC):
    """Shares that depend on nothing but the layer's place, and on how many tokens the row has to hold.

    Class attributes:
        foreseen: how many times the budget a row is taken to become that single tokens have filled; None = heads hold
            equally many then, until several tokens come.
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
    """Shares among layers that each row's prompt decides, layer by layer while the forward runs.

    As soon as a layer has attended, the total is shared out among the layers so far; earlier layers give up tokens.

    Class attributes:
        once: whether the first prompt that overflows decides for all that follows; else each that does decides anew.
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
