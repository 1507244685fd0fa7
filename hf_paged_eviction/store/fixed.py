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
        return self._make(keys, slots), self._make(values, slots)

    def _make(self, like: Tensor, slots: int) -> Tensor:
        return static(super()._make(like, slots).zero_())

    def put(self, keys: Tensor | None, values: Tensor | None) -> None:
        """See `Store.put`; where attention reads turned states, there is room for them at once."""
        super().put(keys, values)
        if self.turning is not None and self.turning.turned is None and keys is not None:
            self._put_turned(self._make(self._both[self.turning.of], self.slots))

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Store.map_rows`; as many rows as before (beams) stay at the same address."""
        old = self._all
        new = [change(states) for states in old]
        if new[0].shape == old[0].shape:
            for states, changed in zip(old, new, strict=True):
                states.copy_(changed)
        else:
            self.put(static(new[0]), static(new[1]))
            for changed in new[2:]:
                self._put_turned(static(changed))

    def clear(self) -> None:
        """See `Store.clear`."""
        if self._keys is not None and self._values is not None:
            for states in self._all:
                states.zero_()
