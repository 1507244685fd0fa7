"""What the layers of one cache may hold, where they share one budget."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..saved import LONGEST, SavedState, StateDict
from ..table.budget import BlockBudget
from ..table.spans import Spans


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

    def state_dict(self) -> StateDict:
        """What was decided."""
        return {"shares": self._shares}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """Share out as another cache did.

        Raises:
            ValueError: it does not fit.
        """
        shares, size = saved.part("shares"), self.budget.block_size
        for place in range(self.layers):
            if shares.has(str(place)):
                self._shares[place] = shares.tensor(str(place), (rows, None), torch.int64, size, LONGEST)
        if self._shares and self.budget.tokens is None:  # it was given in bytes, or as a share
            tokens = sum(int(share[0].sum()) for share in self._shares.values())
            self.begin(self.budget.of(self._mean(tokens, sum(share.shape[1] for share in self._shares.values()))))

    def _mean(self, tokens: int, sets: int) -> int:
        """The mean share, given all tokens of a row in so many sets."""
        return tokens // sets
