"""A layer with a linear state next to paged keys and values."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..table.rollback import columns_to_remove, crop_all_or_none
from .moves import check_crop
from .paged import PagedLayer
from .states import rows_of


class HybridLayer(LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The layer of models that run a linear mixer and attention side by side (falcon_h1, zamba2, zaya).

    It is a subclass of transformers' own layer, so that models find their linear state in it. Methods for keys and
    values call `paged`.

    Args:
        paged: the layer for keys and values.
        linear: the layer that `DynamicCache` makes; it has the number of linear states.
    """

    is_croppable = False
    supports_early_init = True

    def __init__(self, paged: PagedLayer, linear: LinearAttentionAndFullAttentionLayer) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=linear.number_of_states)
        self.paged = paged

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.paged!r})"

    # ---- keys and values ------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """The keys of `paged`; the properties below are also those of `paged`."""
        keys: Tensor | None = self.paged.keys
        return keys

    @property
    def values(self) -> Tensor | None:
        values: Tensor | None = self.paged.values
        return values

    @property
    def is_initialized(self) -> bool:
        return self.paged.is_initialized

    @property
    def is_compileable(self) -> bool:
        return self.paged.is_compileable

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `PagedLayer.update`."""
        return self.paged.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.paged.get_seq_length()

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.paged.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self.paged.get_max_length()

    # ---- both halves ----------------------------------------------------------------------------------------------

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize keys and values if they are positional arguments, the linear state if it is a keyword argument."""
        if args:
            self.paged.lazy_initialization(*args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        self.paged.offload()
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        self.paged.prefetch()
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        self.paged.reset()
        LinearAttentionLayer.reset(self)

    def activate_past_recording(self) -> None:
        self.paged.activate_past_recording()
        LinearAttentionLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        """See `PagedLayer.crop` and `crop_state`. Crops both parts, or none."""
        seen = self.get_seq_length()
        count = columns_to_remove(tokens_to_remove, seen)
        check_crop(self.paged.state, count)
        crop_all_or_none([self], [self.crop_state], count, seen - count)
        self.paged.crop(-count)

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
        self.paged.reorder_cache(beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            LinearAttentionLayer.reorder_cache(self, _repeated(self.paged.table.rows, repeats))
        self.paged.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.paged.batch_select_indices(indices)
        LinearAttentionLayer.reorder_cache(self, _numbers(indices))


def paged_part(layer: Any) -> PagedLayer | None:
    """The paged layer in a layer of a cache; None if there is none."""
    if isinstance(layer, PagedLayer):
        return layer
    return layer.paged if isinstance(layer, HybridLayer) else None


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
