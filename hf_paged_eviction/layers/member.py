"""What the other layers of a cache know of a layer."""

from dataclasses import dataclass

import torch

from ..integration.rotary import Rotary
from ..policies import Needs
from .compiled import Compiled
from .contents import Contents
from .scores import Scores


@dataclass(eq=False)
class Member:
    """The parts of a layer that cohorts and compiled steps work with, never the layer itself.

    A layer holds its cohorts and its steps, and those hold members. If they held layers, the storage of a cache that
    nobody uses any more would stay until Python looks for circles.

    Attributes:
        contents, scores: of the layer.
        needs: of the policy.
        rotary: see `PagedLayer`.
        compiled: how the layer of a static cache takes single tokens; None in any other.
    """

    contents: Contents
    scores: Scores
    needs: Needs
    rotary: Rotary | None
    compiled: Compiled | None = None

    @property
    def device(self) -> torch.device | None:
        """Of keys and values."""
        return self.contents.store.device

    @property
    def seen(self) -> int:
        """Tokens that the host has counted."""
        return 0 if self.contents.table is None else self.contents.table.seen
