"""How many tokens one layer may hold: as many as it was given, or a number of its own in each row or KV head."""

import torch
from torch import Tensor

from ..integration.heads import HeadShare
from ..queries.observer import Queries
from ..table.budget import BlockBudget
from .base import HeadAllocator
from .cascade import Cascade, Sharer
from .share import share_out


class Quota:
    """As many as the layer was given, the same in every row and head.

    Attributes:
        unequal: whether rows or heads may hold different numbers; the storage is as long as the largest, and slots
            beyond a smaller one are dead. Every forward of several tokens decides anew.
        scores: `[B, S, held]` of the tokens held, as of the forward that goes on; None where they are to be worked out.
            What neighbours or sums were before it evicted counts where the numbers change again.
    """

    unequal = False

    def __init__(self) -> None:
        self.scores: Tensor | None = None

    def check(self, kv_heads: int, share: HeadShare) -> None:
        """Refuse heads that are spread over processes, where that cannot be right.

        Raises:
            ValueError: with the way out.
        """

    def decide(self, layer: Sharer, queries: Queries, key_positions: Tensor, query_positions: Tensor) -> None:
        """A layer has attended; see `Cascade.attended`."""

    def room(self, asked: BlockBudget, present: BlockBudget) -> int | Tensor:
        """Tokens that the layer may hold, as policies are told: see `ScoreContext.budget`."""
        return asked.tokens or present.capacity

    def limits(self, asked: BlockBudget, pinned: Tensor, positions: Tensor) -> Tensor | None:
        """`[B, S]` tokens that each set may hold from now on; None = all the same.

        Args:
            asked: the mean share.
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
        """
        return None


class RowQuota(Quota):
    """A number for each row, from what is shared out among layers.

    Args:
        cascade: one object per cache.
        layer: whose number this is.
    """

    unequal = True

    def __init__(self, cascade: Cascade, layer: Sharer) -> None:
        super().__init__()
        self._cascade, self._layer = cascade, layer
        cascade.add(layer)

    def decide(self, layer: Sharer, queries: Queries, key_positions: Tensor, query_positions: Tensor) -> None:
        """See `Quota.decide`."""
        self._cascade.attended(layer, queries, key_positions, query_positions)

    def room(self, asked: BlockBudget, present: BlockBudget) -> int | Tensor:
        """See `Quota.room`."""
        share = self._cascade.share(self._layer)
        return asked.capacity if share is None else share[..., None]

    def limits(self, asked: BlockBudget, pinned: Tensor, positions: Tensor) -> Tensor | None:
        """See `Quota.limits`."""
        share = self._cascade.share(self._layer)
        mean = torch.full((positions.shape[0], 1), asked.capacity, device=positions.device)
        return (mean if share is None else share.to(mean)).expand(-1, positions.shape[1])


class HeadQuota(Quota):
    """A number for each row and KV head.

    Args:
        allocator: shares out among the heads of a layer.
    """

    unequal = True

    def __init__(self, allocator: HeadAllocator) -> None:
        super().__init__()
        self._allocator = allocator

    def check(self, kv_heads: int, share: HeadShare) -> None:
        """See `Quota.check`."""
        if share.processes(kv_heads) > 1:
            raise ValueError(
                f"The allocator {self._allocator.name!r} compares all KV heads of a layer, and tensor parallelism "
                "gave some to other processes, which would have to make room for what is decided here. Use "
                "allocator='uniform' or one that shares out among layers, or keep the model in one process."
            )

    def room(self, asked: BlockBudget, present: BlockBudget) -> int | Tensor:
        """See `Quota.room`."""
        return asked.capacity

    def limits(self, asked: BlockBudget, pinned: Tensor, positions: Tensor) -> Tensor | None:
        """See `Quota.limits`."""
        size, sets = asked.block_size, positions.shape[1]
        weights = self._allocator.weights(pinned, asked.capacity)
        most = -(-(positions[:, 0] >= 0).sum(-1) // size)
        blocks = share_out(weights, asked.capacity // size * sets, asked.smallest // size, most)
        return blocks.to(positions.device) * size
