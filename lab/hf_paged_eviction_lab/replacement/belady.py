"""Belady's rule, the optimum for recorded traces."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Replacement, Resident


@dataclass(frozen=True)
class Belady(Replacement):
    """Evicts the block that will be needed last. It has to know the future, and serves one row and one set.

    Args:
        trace: the blocks needed at each moment, from moment 0 on.

    Raises:
        ValueError: there is no trace.
    """

    trace: Sequence[Set[int]] = ()
    _moments: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.trace:
            raise ValueError(
                "belady needs to know the future requests: it is the lower bound on recorded traces, "
                "Belady(trace=[{3, 4}, {4}, ...]). Use Lru()."
            )
        for moment, blocks in enumerate(self.trace):
            for block in blocks:
                self._moments.setdefault(block, []).append(moment)

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        moment, never = int(now[0]), len(self.trace)
        following = [
            next((at for at in self._moments.get(block, ()) if at > moment), never) for block in ids[0, 0].tolist()
        ]
        return -torch.tensor(following, device=ids.device)[None, None]
