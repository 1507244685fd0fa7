"""Where the tensors of columns come from, and where they go."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .pool import StoragePool


def static(tensor: Tensor) -> Tensor:
    """Tell compiled graphs that this tensor stays where it is."""
    if not torch.compiler.is_compiling():
        # Not guarded by identity, so that the next cache of the same shape runs the same graph.
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def static_zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A static tensor that may be written to in and out of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return static(torch.zeros(tuple(shape), dtype=dtype, device=device))


class Room:
    """Makes tensors for what lies per slot, and takes them back.

    Attributes:
        fixed: they stay where they are, for compiled steps.
        zeroed: they hold zeros at first. A slot that is hidden by a mask still takes part in 0 x value: where such
            slots are read, they must hold a number.
        pool: where tensors come from and go to; None = they are made here and forgotten.

    Args:
        fixed, zeroed: see above; what is fixed is zeroed.
    """

    def __init__(self, fixed: bool = False, zeroed: bool = False) -> None:
        self.fixed = fixed
        self.zeroed = zeroed or fixed
        self.pool: StoragePool | None = None

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that may be written to in and out of `torch.inference_mode`."""
        take = torch.empty if self.pool is None else self.pool.take
        with torch.inference_mode(False):
            tensor = take(shape, dtype=dtype, device=device)
            if self.zeroed:
                tensor.zero_()
        return static(tensor) if self.fixed else tensor

    def like(self, states: Mapping[str, Tensor], slots: int) -> dict[str, Tensor]:
        """As `make`, a tensor like each of these `[rows, sets, n, ...]` with another number of slots."""
        take, tensors = torch.empty if self.pool is None else self.pool.take, {}
        with torch.inference_mode(False):
            for name, state in states.items():
                shape = (*state.shape[:2], slots, *state.shape[3:])
                column = take(shape, dtype=state.dtype, device=state.device)
                tensors[name] = self.own(column.zero_() if self.zeroed else column)
        return tensors

    def own(self, tensor: Tensor) -> Tensor:
        """This tensor, made elsewhere, as one that stays where it is, if these do."""
        return static(tensor) if self.fixed else tensor

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors back, those that were made last first: what comes back last is handed out first."""
        if self.pool is not None:
            self.pool.give(*reversed([*tensors]))
