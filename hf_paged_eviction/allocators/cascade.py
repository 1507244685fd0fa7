"""The shares of a cache's layers, decided while a forward walks through them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..parts import map_tensors, persistent
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .base import FixedAllocator, LayerAllocator
from .share import share_out
from .sharing import Sharing, SharingSnapshot


@dataclass(frozen=True)
class CascadeSnapshot(SharingSnapshot):
    """What was decided.

    Attributes:
        preferences: by the layer's place, `[B]`.
        real: `[B]` real tokens in the last forward of several tokens.
    """

    preferences: dict[int, Tensor]
    real: Tensor | None


class Cascade(Sharing):
    """What each layer may hold (CAKE's cascade, arXiv 2503.12491).

    The total is shared out among the layers that have attended so far. Each new one takes from the others, so their sum
    never exceeds the total; until the last one is through, none gets more than its row has tokens. Where the shares
    depend on the layer's place alone, all are known as soon as the first layer says how many tokens each row has.

    Args:
        allocator: weighs the layers.
        budget: mean share.
    """

    def __init__(self, allocator: LayerAllocator | FixedAllocator, budget: BlockBudget) -> None:
        super().__init__(budget)
        self._allocator = allocator
        self._preferences: dict[int, Tensor] = {}  # by place, [B]
        self._real: Tensor | None = None  # [B] real tokens in the last forward of several tokens

    def attended(
        self, place: int, local_heads: LocalHeads, queries: Queries, key_positions: Tensor, query_positions: Tensor
    ) -> bool:
        """Share out anew.

        Returns whether the other layers have to fit what they may hold then, so that the total holds. Where shares were
        known beforehand, each fits when its own tokens come.

        Args:
            place: of the layer whose queries these are.
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        allocator, real = self._allocator, key_positions[:, 0].amax(-1) + 1
        if isinstance(allocator, FixedAllocator):
            if place == 0:
                self._real = real
                self._share_out(real)
            return False
        zero = torch.zeros((), device=key_positions.device)
        start = {name: zero for name in allocator.token_statistics}
        found = fold(allocator.observe, start, queries, key_positions, query_positions, allocator.window, local_heads)
        found = {name: local_heads.gather(values) for name, values in found.items()}
        self._preferences[place] = allocator.preference(found, local_heads.gather(key_positions))
        self._real = real
        self._share_out(real)
        return True

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """See `Sharing.protect`: decide anew."""
        super().protect(spans)
        if self._real is not None:
            self._share_out(self._real)

    def shrink(self, budget: BlockBudget) -> None:
        """See `Sharing.shrink`: decide anew."""
        super().shrink(budget)
        if self._real is not None:
            self._share_out(self._real)

    def _share_out(self, real: Tensor) -> None:
        size, smallest = self.budget.block_size, self.budget.smallest
        allocator, capacity = self._allocator, self.budget.capacity
        if isinstance(allocator, FixedAllocator):
            places = list(range(self.layers))
            weights = torch.tensor([allocator.weights(self.layers, capacity)]).expand(len(real), -1)
        else:
            places = sorted(self._preferences)
            weights = allocator.weights(torch.stack([self._preferences[place] for place in places], dim=1), capacity)
        total = capacity // size * self.layers
        most = (-(-real // size)).cpu()
        blocks = share_out(weights, total, smallest // size, most)
        if len(places) < self.layers:
            blocks = blocks.minimum(most.clamp_min(smallest // size)[:, None])
        shares = (blocks * size).to(real.device)
        self._shares = {place: shares[:, at : at + 1] for at, place in enumerate(places)}

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Sharing.map_rows`."""
        super().map_rows(change)
        self._preferences = {place: change(preference) for place, preference in self._preferences.items()}
        self._real = None if self._real is None else change(self._real)

    def clear(self) -> None:
        """See `Sharing.clear`."""
        super().clear()
        self._preferences, self._real = {}, None

    def snapshot(self) -> CascadeSnapshot:
        """See `Sharing.snapshot`."""
        return CascadeSnapshot(self._shares, self._preferences, self._real)

    def restore(self, saved: SharingSnapshot, device: torch.device) -> None:
        """See `Sharing.restore`."""
        super().restore(saved, device)
        if isinstance(saved, CascadeSnapshot):
            found = map_tensors(lambda tensor: persistent(tensor.to(device)), saved)
            self._preferences, self._real = dict(found.preferences), found.real
        if self._shares and self.budget.tokens is None:  # it was given in bytes
            self.begin(self.budget.of(sum(int(share[0]) for share in self._shares.values()) // self.layers))
