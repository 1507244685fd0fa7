"""What the layers of one cache may hold, where they share one budget."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..parts import Snapshot, map_tensors, persistent
from ..table.budget import BlockBudget
from ..table.spans import Spans


@dataclass(frozen=True)
class SharingSnapshot(Snapshot):
    """What was decided.

    Attributes:
        shares: by the layer's place, `[B, sets]` tokens.
    """

    shares: dict[int, Tensor]


class Sharing:
    """One object per cache.

    Attributes:
        layers: how many there are so far.
        budget: mean share; of a budget in bytes not known before the first tokens.

    Args:
        budget: mean share.
    """

    def __init__(self, budget: BlockBudget) -> None:
        self.layers = 0
        self._asked = self.budget = budget
        self._shares: dict[int, Tensor] = {}  # by place, [B, sets] tokens

    def add(self) -> None:
        """One more layer, in the order of the model."""
        self.layers += 1

    def share(self, place: int) -> Tensor | None:
        """`[B, sets]` tokens that the layer at this place may hold; None before anything was decided."""
        return self._shares.get(place)

    def begin(self, budget: BlockBudget) -> None:
        """Nothing was shared out yet, and the mean share is known."""
        self.budget = budget

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Other spans are protected from now on. The layers follow when they are told."""
        self._asked, self.budget = replace(self._asked, spans=spans), replace(self.budget, spans=spans)

    def shrink(self, budget: BlockBudget) -> None:
        """Another mean share. The layers follow when they are asked to shrink."""
        self._asked = self.budget = budget

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        self._shares = {place: change(share) for place, share in self._shares.items()}

    def clear(self) -> None:
        """Forget the prompt."""
        self.budget, self._shares = self._asked, {}

    def snapshot(self) -> SharingSnapshot:
        """What was decided."""
        return SharingSnapshot(self._shares)

    def restore(self, saved: SharingSnapshot, device: torch.device) -> None:
        """Share out as another cache did."""
        self._shares = dict(map_tensors(lambda tensor: persistent(tensor.to(device)), saved.shares))
