"""What the other layers of a cache know of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.rotary import Rotary
from ..policies import Needs
from ..table.budget import BlockBudget
from .compiled_write import CompiledWrite
from .layer_state import LayerState
from .overflow import Overflow
from .scores import Scores


@dataclass(eq=False)
class Member:
    """The parts of a layer that groups and compiled steps work with, never the layer itself.

    A layer holds its groups and its steps, and those hold members. If they held layers, the storage of a cache that
    nobody uses any more would stay until Python looks for circles.

    Attributes:
        state, scores, overflow: of the layer.
        needs: of the policy.
        rotary: see `PagedLayer`.
        compiled_write: of the layer of a static cache; None in any other.
    """

    state: LayerState
    scores: Scores
    overflow: Overflow
    needs: Needs
    rotary: Rotary | None
    compiled_write: CompiledWrite | None = None

    @property
    def device(self) -> torch.device | None:
        """Of keys and values."""
        return self.state.store.device

    @property
    def seen(self) -> int:
        """Columns that the host has counted, those that wait for `crop` included."""
        return self.state.seen

    @property
    def in_steps(self) -> CompiledWrite:
        """Of a layer that has entered compiled steps."""
        if self.compiled_write is None:
            raise RuntimeError("The layer takes no part in compiled steps.")
        return self.compiled_write

    def written(self) -> None:
        """The host has counted a token that a compiled step has written."""
        if self.compiled_write is not None:
            self.compiled_write.written()

    def grant(self, budget: BlockBudget) -> None:
        """Hold so many tokens, which a budget in bytes has turned out to be."""
        self.state.budget.now = budget

    def fit(self, free: Tensor | None = None) -> None:
        """Give up, or get room for, tokens: the budget has changed. Not while tokens wait for `crop`."""
        if self.state.table is not None and self.state.pending is None:
            self.overflow.fit(free=free)

    def offer(self, free: Tensor | None = None) -> None:
        """Say what could stay, see `Overflow.offer`."""
        self.overflow.offer(free)
