"""The workers' side: what each attention backend of vLLM is given more, in three mixins.

`cpu` and `gpu` join them with stock backends. Where nothing evicts, they do what the stock backend does.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_paged_eviction.internals import Logits

from .group import Group, spec_of
from .pages import LayerPages, PlainPages
from .settings import latest, settings_of
from .spec import EvictionSpec
from .step import Batch, VllmStep

if TYPE_CHECKING:  # what each mixin is joined with
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
else:
    AttentionBackend = AttentionImpl = AttentionMetadataBuilder = object


class EvictingBackend(AttentionBackend):
    """Turns the specs of layers that evict."""

    evicting_impl: ClassVar[type]
    evicting_builder: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> Any:
        """See `AttentionBackend`."""
        return super().get_impl_cls() if settings_of(get_current_vllm_config()) is None else cls.evicting_impl

    @classmethod
    def get_builder_cls(cls) -> Any:
        """See `AttentionBackend`."""
        return cls.evicting_builder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """See `AttentionBackend`."""
        spec = super().customize_spec(spec)
        config, settings = latest()
        if type(spec) is not FullAttentionSpec or settings is None:
            return spec
        return spec_of(spec, config, settings)


class Evicting(NamedTuple):
    """The plan, as the layers find it in their metadata.

    Attributes:
        step: the plan.
        layers: metadata of each layer, where sets differ.
        order: see `EvictingBuilder._order`.
    """

    step: VllmStep
    layers: list[Any] | None = None
    order: Tensor | None = None


class EvictingBuilder(AttentionMetadataBuilder):
    """Plans each forward, and gives attention the pages that the plan names."""

    #: Names of attributes with the number of query heads and of KV heads.
    heads_named: ClassVar[tuple[str, str]] = ("num_heads", "num_kv_heads")
    pages: ClassVar[type[LayerPages]] = PlainPages

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = settings_of(vllm_config)
        self._group: Group | None = None
        self._of_sets: Any = copy.copy(self)  # for sets that differ: a sequence for each, with its heads
        if settings is not None and isinstance(kv_cache_spec, EvictionSpec):
            self._group = Group(kv_cache_spec, layer_names, vllm_config, settings)
            for name in self.heads_named:
                setattr(self._of_sets, name, getattr(self, name) // self._group.sets)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """See `AttentionMetadataBuilder`: no request is there."""
        if self._group is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return super().build(0, common_attn_metadata)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """See `AttentionMetadataBuilder`: no two requests that evict share blocks."""
        return self._group is None and super().use_cascade_attention(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See `AttentionMetadataBuilder`."""
        common, group = common_attn_metadata, self._group
        step = None if group is None else group.step(common, self.pages)
        if group is None or step is None:
            return super().build(common_prefix_len if group is None else 0, common, fast_build)
        step.begin()
        if not group.unequal:
            metadata = super().build(0, _renewed(common, step.batch()), fast_build)
            metadata.eviction = Evicting(step)
            return metadata
        counts = [entry.count for entry in step.entries]
        starts = torch.tensor([0, *np.repeat(counts, group.sets).cumsum()], dtype=common.query_start_loc_cpu.dtype)
        fields = {
            "query_start_loc": starts.to(common.query_start_loc.device),
            "query_start_loc_cpu": starts,
            "num_actual_tokens": int(starts[-1]),
        }
        layers = [self._of_sets.build(0, _renewed(common, batch, **fields)) for batch in step.batches()]
        layers[0].eviction = Evicting(step, layers, _order(step, group.sets, common.query_start_loc.device))
        return layers[0]


def _renewed(common: Any, batch: Batch, **fields: Any) -> Any:
    """What vLLM tells a builder, of these sequences."""
    return replace(
        common,
        num_reqs=len(batch.lengths),
        seq_lens=batch.lengths,
        seq_lens_cpu_upper_bound=None,
        max_seq_len=batch.longest,
        block_table_tensor=batch.table,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **fields,
    )


def _order(step: VllmStep, sets: int, device: torch.device) -> Tensor | None:
    """The queries of all sets one after the other, as indices token times sets + set; None = as they are."""
    if all(entry.count == 1 for entry in step.entries):
        return None
    parts = [
        (np.arange(entry.first, entry.first + entry.count) * sets + np.arange(sets)[:, None]).ravel()
        for entry in step.entries
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)


class EvictingImpl(AttentionImpl):
    """Attention of a layer that evicts."""

    #: Where the layer is in its group; None = it does not evict, or no request has come.
    evicts: int | None = None
    _of_set: Any = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `AttentionImpl`: `forward` writes new tokens to places of its own."""
        if self.evicts is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        """See `AttentionImpl`."""
        plan: Evicting | None = getattr(attn_metadata, "eviction", None)
        place = self.evicts
        if plan is None or place is None:
            stock: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
            return stock
        plan.step.write(place, key, value)
        if plan.layers is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
        else:
            self._attend_sets(layer, (query, key, value), plan.layers[place], plan, output)
        logits = Logits(self.scale, getattr(self, "logits_soft_cap", None) or None, getattr(self, "sinks", None))
        if query.element_size() == 1:  # on some GPUs attention takes queries of 8 bits, too
            query = (query.float() * layer._q_scale).to(key.dtype)
        plan.step.after(place, query, *plan.step.stored(place, key, value), logits)
        return output

    def _attend_sets(
        self, layer: Any, new: tuple[Tensor, Tensor, Tensor], metadata: Any, plan: Evicting, output: Tensor
    ) -> None:
        """Attention of sequences of one set each."""
        pages, count, order = plan.step.pages, plan.step.count, plan.order
        by_set = output[:count].unflatten(1, (pages.sets, -1)).flatten(0, 1)
        parts = [part[:count].unflatten(1, (pages.sets, -1)).flatten(0, 1) for part in new]
        if order is not None:
            parts = [part[order] for part in parts]
        out = by_set if order is None else torch.empty_like(parts[0])
        if self._of_set is None:
            self._of_set = copy.copy(self)
            self._of_set.evicts = None  # attention alone
            self._of_set.num_heads //= pages.sets
            self._of_set.num_kv_heads //= pages.sets
        assert self.evicts is not None  # noqa: S101  (for mypy)
        self._of_set.forward(layer, *parts, pages.memory.memory, metadata, out)
        if order is not None:
            by_set[order] = out
