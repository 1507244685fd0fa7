"""A store whose tensors stay where they are, for compiled steps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .store import Store


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


class FixedStore(Store):
    """As many slots as the budget from the start. Slots that are not in use hold zeros.

    A slot that is hidden by the mask still takes part in 0 x value: it must hold a number.
    """

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """All."""
        return most

    def new(self, keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """See `Store.new`; zeros."""
        new_keys, new_values = super().new(keys, values, slots)
        return static(new_keys.zero_()), static(new_values.zero_())

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Store.map_rows`; as many rows as before (beams) stay at the same address."""
        old = self._both
        new = change(old[0]), change(old[1])
        if new[0].shape == old[0].shape:
            old[0].copy_(new[0])
            old[1].copy_(new[1])
        else:
            self.put(static(new[0]), static(new[1]))

    def clear(self) -> None:
        """See `Store.clear`."""
        if self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()
