"""A paged layer with a linear state beside its keys and values."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..table.budget import BlockBudget
from ..table.rollback import columns_to_remove, crop_all_or_none
from .moves import check_crop
from .paged import PagedLayer
from .parameters import Common, Place
from .states import rows_of


class HybridLayer(PagedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The layer of models that run a linear mixer and attention side by side (falcon_h1, zamba2, zaya).

    transformers 5.14 tells such layers from linear ones by its own class.

    Attributes:
        dtype, device: of the linear state.

    Args:
        budget, common, place: see `PagedLayer`.
        number_of_states: see `LinearAttentionLayer`.
    """

    is_croppable = False
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def __init__(self, budget: BlockBudget, common: Common, place: Place, number_of_states: int) -> None:
        PagedLayer.__init__(self, budget, common, place)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize keys and values if they are positional arguments, the linear state if it is a keyword argument."""
        kind = PagedLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        """See `PagedLayer.offload`."""
        PagedLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """See `PagedLayer.prefetch`."""
        PagedLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        """See `PagedLayer.reset`."""
        PagedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """See `PagedLayer.crop` and `crop_state`. Crops both parts, or none."""
        seen = self.get_seq_length()
        count = columns_to_remove(tokens_to_remove, seen)
        check_crop(self.state, count)
        crop_all_or_none([self], [self.crop_state], count, seen - count)
        PagedLayer.crop(self, -count)

    def crop_state(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens, `-n` or 0, in the linear state only.

        Raises:
            RuntimeError: the state is recurrent, or nothing was recorded.
        """
        if tokens_to_remove and any(self.is_recurrent_states_initialized.values()):
            raise RuntimeError(
                "This layer has a recurrent state, which holds all tokens at once: none can be taken back. Keep a "
                "copy.deepcopy of the cache from before those tokens."
            )
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `PagedLayer.reorder_cache`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `PagedLayer.batch_repeat_interleave`."""
        if self.get_seq_length():
            LinearAttentionLayer.reorder_cache(self, _repeated(self.table.rows, repeats))
        PagedLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `PagedLayer.batch_select_indices`."""
        PagedLayer.batch_select_indices(self, indices)
        LinearAttentionLayer.reorder_cache(self, _numbers(indices))


# ---- rows of any layer -----------------------------------------------------------------------------------------------


def repeat_rows(layer: Any, repeats: int) -> None:
    """Repeat every row of a layer, also of layers with only a linear state, which have no method for it."""
    if hasattr(layer, "batch_repeat_interleave"):
        layer.batch_repeat_interleave(repeats)
    else:
        layer.reorder_cache(_repeated(rows_of(layer), repeats))


def select_rows(layer: Any, indices: Tensor) -> None:
    """Keep the rows `indices` (int64 or bool `[rows]`) of a layer, see `repeat_rows`."""
    if hasattr(layer, "batch_select_indices"):
        layer.batch_select_indices(indices)
    else:
        layer.reorder_cache(_numbers(indices))


def _repeated(rows: int, repeats: int) -> Tensor:
    return torch.arange(rows, device="cpu").repeat_interleave(repeats)


def _numbers(indices: Tensor) -> Tensor:
    return indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
