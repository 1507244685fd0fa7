"""What shares the budget out among layers and KV heads."""

from abc import ABC, abstractmethod

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
    """


class FixedAllocator(BudgetAllocator, ABC):
    """Shares that depend on nothing but the layer's place, and on how many tokens the row has to hold."""

    @abstractmethod
    def weights(self, layers: int, budget: int) -> list[float]:
        """One number per layer, proportional to its share; `budget` is the mean share in tokens."""


class LayerAllocator(BudgetAllocator, ABC):
    """Shares among layers that each row's prompt decides, layer by layer while the forward runs.

    As soon as a layer has attended, the total is shared out among the layers so far; earlier layers give up tokens.
    """

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
        """What a layer's attention says of it, `[batch]` float32.

        Args:
            statistics: of all KV heads, in dimension 1.
            positions: `[batch, kv_heads, tokens]` int64, -1 for pads.
        """

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        """Preferences `[batch, layers]` as numbers proportional to the shares, same shape.

        Args:
            budget: mean share of a layer in tokens.
        """
        return preferences


class HeadAllocator(BudgetAllocator, ABC):
    """Shares among the KV heads of a layer, decided by the scores of its tokens. Needs heads="separate"."""

    @abstractmethod
    def weights(self, scores: Tensor, budget: int) -> Tensor:
        """Numbers `[batch, kv_heads]` proportional to the shares.

        Args:
            scores: `[batch, kv_heads, tokens]` float32, high = keep; inf = protected, -inf = a pad.
            budget: mean share of a head in tokens.
        """
