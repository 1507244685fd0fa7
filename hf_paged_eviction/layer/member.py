"""The parts of a layer that groups and compiled steps use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.rotary import Rotary
from ..policies import Needs
from .compiled_write import CompiledWrite
from .layer_state import LayerState
from .overflow import Overflow
from .rollback import Rollback
from .scores import Scores


@dataclass(eq=False)
class Member:
    """The parts of a layer that groups and compiled steps use, without the layer itself.

    A layer holds its groups and its steps, and those hold members. If they held layers, the reference cycle would keep
    the storage of an unused cache until Python's garbage collector runs.

    Attributes:
        state, scores, overflow, rollback: parts of the layer.
        needs: needs of the policy.
        rotary: see `PagedLayer`.
        compiled_write: part of a layer of a static cache; None in other caches.
    """

    state: LayerState
    scores: Scores
    overflow: Overflow
    rollback: Rollback
    needs: Needs
    rotary: Rotary | None
    compiled_write: CompiledWrite | None = None

    @property
    def device(self) -> torch.device | None:
        """Device of keys and values."""
        return self.state.store.device

    @property
    def seen(self) -> int:
        """Number of columns that the host has counted, pending ones included."""
        return self.state.seen

    @property
    def in_steps(self) -> CompiledWrite:
        """`compiled_write`, which must exist."""
        if self.compiled_write is None:
            raise RuntimeError("The layer takes no part in compiled steps.")
        return self.compiled_write

    def written(self) -> None:
        """Called after the host has counted a token that a compiled step has written."""
        if self.compiled_write is not None:
            self.compiled_write.written()

    def fit(self, free: Tensor | None = None) -> None:
        """Evict, or make room, because the budget has changed. Not allowed while tokens are pending."""
        if self.state.table is not None and self.state.pending is None:
            self.overflow.fit(free=free)

    def offer(self, free: Tensor | None = None) -> None:
        """See `Overflow.offer`."""
        self.overflow.offer(free)
