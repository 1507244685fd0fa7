"""What shares the budget out among layers and KV heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention.weights import Attention
from ..naming import Named
from ..policies import Statistics
from ..table.budget import BlockBudget
from .share import in_whole_blocks, share_out


class BudgetAllocator(Named):
    """Decides how many tokens each layer, or each KV head, may hold. The total is that of equal shares.

    Shares are whole blocks. No share is below the smallest legal budget. As long as other shares can use the rest, no
    share exceeds the number of tokens of its row. Like a policy, an allocator holds parameters only.

    Class attributes:
        name: set by `register_allocator`.
        paper: arXiv id, or None.
        per_head: whether the KV heads of a layer may hold different numbers of tokens.
    """

    per_head: ClassVar[bool] = False

    @property
    def divides_heads(self) -> bool:
        """Whether the KV heads of a layer do, which needs heads="separate"."""
        return self.per_head

    def check_model(self, config: Any) -> None:
        """Check that this allocator can serve a model.

        Args:
            config: `model.config`.

        Raises:
            ValueError: it cannot; the message names the difference.
        """

    def budgets(self, mean: BlockBudget, layers: int) -> list[BlockBudget]:
        """The budget of each paged layer before the first forward."""
        return [mean] * layers

    def most_stored(self, mean: BlockBudget, layers: int, rows: int) -> int:
        """Tokens per row that the storage of all layers together may have room for."""
        return mean.capacity * layers


class FixedAllocator(BudgetAllocator, ABC):
    """Decides the shares by the index of the layer and the number of tokens of the row, and by nothing else.

    Class attributes:
        foreseen: when single tokens have filled the budget, shares are computed for a text of `foreseen` times the
            budget. None = shares stay equal until the next forward of several tokens.
    """

    foreseen: ClassVar[int | None] = None

    @abstractmethod
    def weights(self, layers: int, budget: int) -> list[float]:
        """One number per layer, proportional to its share; `budget` is the mean share in tokens."""

    def shares(self, layers: int, budget: int, tokens: Tensor) -> list[Tensor]:
        """Numbers proportional to the shares, `[rows, 1 or kv_heads]` for each layer.

        Args:
            layers: number of paged layers.
            budget: mean share in tokens.
            tokens: `[rows]` int64, number of tokens of each row.
        """
        return [torch.full((len(tokens), 1), weight, device="cpu") for weight in self.weights(layers, budget)]

    def limits(self, mean: BlockBudget, layers: int, tokens: Tensor) -> list[Tensor]:
        """The shares in tokens, `[rows, 1 or kv_heads]` int64 on the CPU for each layer; arguments as in `shares`."""
        return in_whole_blocks(self.shares(layers, mean.capacity, tokens), mean, tokens)

    def most_stored(self, mean: BlockBudget, layers: int, rows: int) -> int:
        """See `BudgetAllocator.most_stored`. A layer's storage is as long as its longest row: in a batch, the first
        layers may be long for one row and the last ones for another."""
        if rows == 1 or self.divides_heads:
            return super().most_stored(mean, layers, rows)
        total = torch.tensor([mean.capacity * layers], device="cpu")
        return sum(max(int(tokens), mean.capacity) for tokens in self.limits(mean, layers, total))


class LayerAllocator(BudgetAllocator, ABC):
    """Decides the shares by the attention of each row's prompt, once all layers have attended.

    Class attributes:
        token_statistics: names of the statistics that `observe` updates.
        reads_weights: whether `observe` reads the weights of all tokens; it gets the queries in pieces then.
        once: True if the first prompt that overflows decides for the rest of the text; False if each one decides again.
    """

    token_statistics: ClassVar[tuple[str, ...]]
    reads_weights: ClassVar[bool] = True
    once: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        """Number of queries at the end of a forward that `observe` gets; None = all."""
        return None

    @abstractmethod
    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        """Update the statistics of one layer, as `EvictionPolicy.observe` does. They are dropped after the forward.

        Each starts as a scalar zero. Afterwards it is what the last call returned: `[batch, kv_heads, ...]`, any shape.
        """

    @abstractmethod
    def preference(self, statistics: Statistics, positions: Tensor) -> Tensor:
        """Rate a layer, `[batch]` float32: the larger, the more tokens. If `per_head`, each KV head: `[batch,
        kv_heads]`.

        Args:
            statistics: as `observe` returned them, with all KV heads of the layer in dimension 1.
            positions: `[batch, kv_heads, tokens]` int64, -1 for pads.
        """

    def weights(self, preferences: Tensor, budget: int) -> Tensor:
        """Turn preferences `[batch, layers]` (or `[batch, heads of all layers]`) into numbers proportional to shares.

        Args:
            budget: mean share of a layer, or of a head, in tokens.
        """
        return preferences

    def settle(self, preferences: Sequence[Tensor], mean: BlockBudget, tokens: Tensor) -> list[Tensor]:
        """Like `FixedAllocator.limits`, of layers with these preferences `[batch, 1 or kv_heads]`."""
        weights = self.weights(torch.cat(list(preferences), dim=1), mean.capacity)
        widths = [preference.shape[1] for preference in preferences]
        return in_whole_blocks(weights.split(widths, dim=1), mean, tokens)


class HeadAllocator(BudgetAllocator, ABC):
    """Divides the budget of a layer among its KV heads, by the scores of its tokens."""

    per_head: ClassVar[bool] = True

    @abstractmethod
    def weights(self, scores: Tensor, budget: int) -> Tensor:
        """Numbers `[batch, kv_heads]` proportional to the shares.

        Args:
            scores: `[batch, kv_heads, tokens]` float32, high = keep; inf = protected, -inf = a pad.
            budget: mean share of a head in tokens.
        """

    def within(self, scores: Tensor, mean: BlockBudget, tokens: Tensor, least: Tensor) -> Tensor:
        """The shares in tokens, `[batch, kv_heads]` int64 on the CPU.

        Args:
            scores: as in `weights`.
            mean: budget of the layer.
            tokens, least: `[batch]` number of tokens of each row, and smallest share in tokens.
        """
        size, total = mean.block_size, mean.capacity // mean.block_size * scores.shape[1]
        return share_out(self.weights(scores, mean.capacity), total, least // size, -(-tokens // size)) * size
