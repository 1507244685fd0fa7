"""Allocates the tensors of columns."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..graphs import static


def static_zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A static tensor of zeros that may be written to inside and outside of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return static(torch.zeros(tuple(shape), dtype=dtype, device=device))


class Room:
    """Allocates tensors with an entry per slot.

    Attributes:
        fixed: tensors keep their addresses, for compiled steps.
        zeroed: tensors start with zeros. This is necessary if hidden slots are read, because attention computes 0 x
            value for them, which must not be nan.

    Args:
        fixed, zeroed: see above; fixed tensors are always zeroed.
    """

    def __init__(self, fixed: bool = False, zeroed: bool = False) -> None:
        self.fixed = fixed
        self.zeroed = zeroed or fixed

    def make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a tensor that may be written to inside and outside of `torch.inference_mode`."""
        with torch.inference_mode(False):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
            return self.own(tensor.zero_() if self.zeroed else tensor)

    def like(self, states: Mapping[str, Tensor], slots: int, total: int | None = None) -> dict[str, Tensor]:
        """Make a tensor for each of these `[rows, sets, n, ...]`, with another number of slots; `total`: `[total,
        ...]`."""
        tensors = {}
        with torch.inference_mode(False):
            for name, state in states.items():
                shape = (*state.shape[:2], slots) if total is None else (total,)
                column = torch.empty((*shape, *state.shape[3:]), dtype=state.dtype, device=state.device)
                column = column.zero_() if self.zeroed else column
                tensors[name] = static(column) if self.fixed else column
        return tensors

    def own(self, tensor: Tensor) -> Tensor:
        """Mark a tensor that was made elsewhere as static, if this room is `fixed`."""
        return static(tensor) if self.fixed else tensor
