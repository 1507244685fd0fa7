"""The workers' side: what each attention backend of vLLM is given more, in three mixins.

`cpu`, `flash` and `triton` join them with a stock backend. Where nothing evicts, they do what the stock backend does.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_paged_eviction.internals import Logits

from .grouping import Grouping, grouping_of
from .pages import Pages, PlainPages
from .processor import options_of, planned
from .request import Request, Rows
from .settings import settings_of
from .spec import EvictionSpec
from .step import Step, limits_of
from .table import Table

if TYPE_CHECKING:  # what each mixin is joined with
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
else:
    AttentionBackend = AttentionImpl = AttentionMetadataBuilder = object

#: vLLM puts a block that belongs to no request here, into tables of batches that it makes up.
_NO_BLOCK = 0


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
        """See `AttentionBackend`. vLLM calls this once for each layer, in their order, and does not say for which."""
        spec = super().customize_spec(spec)
        grouping = grouping_of()
        if type(spec) is not FullAttentionSpec or grouping is None:
            return spec
        return EvictionSpec.of(spec, **grouping.next(spec))


class EvictingBuilder(AttentionMetadataBuilder):
    """Plans each forward, and gives attention the pages that the plan names."""

    #: Names of attributes with the number of query heads and of KV heads.
    heads_named: ClassVar[tuple[str, str]] = ("num_heads", "num_kv_heads")
    pages: ClassVar[type[Pages]] = PlainPages

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = settings_of(vllm_config)
        self._settings = settings if isinstance(kv_cache_spec, EvictionSpec) else None
        self._table: Table | None = None
        if self._settings is None:
            return
        self._layers = [self._settings.layers[extract_layer_index(name)] for name in layer_names]
        grouping = Grouping(vllm_config, self._settings)
        wrong = [layer.index for layer in self._layers if grouping.kept(layer, kv_cache_spec) != kv_cache_spec.kept]
        if wrong:
            raise RuntimeError(
                f"paged_eviction: layers {wrong} of this model came into another group of layers than was reckoned. "
                'Use allocator="uniform".'
            )
        self._sets = kv_cache_spec.num_kv_heads if self._settings.separate else 1
        self._refuse(vllm_config.compilation_config.static_forward_context)
        planned.add(id(vllm_config))
        self._rows = Rows(2 * vllm_config.scheduler_config.max_num_seqs)
        self._requests: dict[int, Request] = {}
        # Attention of sets that differ: a sequence for each, with the heads of one.
        self._of_sets = copy.copy(self)
        for name in self.heads_named:
            setattr(self._of_sets, name, getattr(self, name) // self._sets)
        self._of_sets._table = None

    def _refuse(self, layers: Any) -> None:
        """Refuse models whose layers cannot evict."""
        own, settings = layers[self.layer_names[0]], self._settings
        if settings is not None and settings.unequal and getattr(own.impl, "sinks", None) is not None:
            raise ValueError(
                "paged_eviction: heads of this model have attention sinks of their own, but heads with budgets of "
                'their own are read one by one. Use allocator="uniform".'
            )
        sharing = [
            name
            for name, layer in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None) in self.layer_names
        ]
        if sharing:
            raise ValueError(
                f"paged_eviction: {sharing[0]} of this model reads the keys and values of a layer that evicts, after "
                "that has evicted. Use PagedEvictionCache with generate."
            )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """See `AttentionMetadataBuilder`: no request is there."""
        return super().build(0, common_attn_metadata)

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        """No two requests share blocks."""
        return False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See `AttentionMetadataBuilder`."""
        common = common_attn_metadata
        if self._settings is None:
            return super().build(common_prefix_len, common, fast_build)
        step = self._step(common)
        if step is None:
            return super().build(0, common, fast_build)
        step.begin()
        if not self._settings.unequal:
            metadata = super().build(0, self._renewed(common, step.batch(), common.query_start_loc), fast_build)
            metadata.eviction = Evicting(step, None, None)
            return metadata
        order = self._order(step, common)
        starts = torch.tensor([0, *np.repeat([entry.count for entry in step.entries], self._sets).cumsum()])
        starts = starts.to(common.query_start_loc)
        layers = [
            type(self)._stock(self._of_sets, self._renewed(common, batch, starts, starts.cpu()))
            for batch in step.batches()
        ]
        layers[0].eviction = Evicting(step, layers, order)
        return layers[0]

    def _stock(self, common: Any) -> Any:
        return super().build(0, common)

    def _renewed(self, common: Any, batch: Any, starts: Tensor, starts_cpu: Tensor | None = None) -> Any:
        """What vLLM tells a builder, of these sequences."""
        return replace(
            common,
            query_start_loc=starts,
            query_start_loc_cpu=common.query_start_loc_cpu if starts_cpu is None else starts_cpu,
            num_reqs=len(batch.lengths),
            num_actual_tokens=int(starts[-1]) if starts_cpu is not None else common.num_actual_tokens,
            seq_lens=batch.lengths,
            seq_lens_cpu_upper_bound=None,
            max_seq_len=batch.longest,
            block_table_tensor=batch.table,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )

    def _order(self, step: Step, common: Any) -> Tensor | None:
        """The queries of all sequences one after the other, as indices token times sets + set; None = as they are."""
        if all(entry.count == 1 for entry in step.entries):
            return None
        parts = [
            (np.arange(entry.first, entry.first + entry.count) * self._sets + np.arange(self._sets)[:, None]).ravel()
            for entry in step.entries
        ]
        return torch.from_numpy(np.concatenate(parts)).to(common.query_start_loc.device)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _step(self, common: Any) -> Step | None:
        """The plan of this batch; None if vLLM made it up."""
        bounds = common.query_start_loc_cpu.tolist()
        lengths = (
            common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
        ).tolist()
        keys = self._keys(common)
        if keys is None:
            return None
        if self._table is None:
            self._make_table()
        assert self._table is not None  # noqa: S101  (for mypy)
        step = Step(self._table, common.block_table_tensor.long(), self._limits, self.kv_cache_spec.kept)
        for number, key in enumerate(keys):
            count = bounds[number + 1] - bounds[number]
            if count > 0:
                step.add(self._request(number, key, lengths[number] - count, common), number, count)
        return step if step.entries else None

    def _keys(self, common: Any) -> Sequence[int] | None:
        """What tells requests apart: their rows in the table of runner V2, or their first blocks."""
        if common.req_idx is not None:
            return common.req_idx.tolist()  # type: ignore[no-any-return]
        first = common.block_table_tensor[:, 0].tolist()
        return None if first[0] == _NO_BLOCK else first

    def _request(self, number: int, key: int, seen: int, common: Any) -> Request:
        settings = self._settings
        assert settings is not None and self._table is not None  # noqa: S101  (for mypy)
        row = key if common.req_idx is not None else self._rows.of(key, seen == 0)
        if seen == 0:
            options = options_of(self.vllm_config, key if common.req_idx is not None else number)
            sizes = options.sizes(settings.sizes)
            self._requests[row] = Request(row, replace(sizes, spans=()), options.protect if sizes.spans else ())
            self._table.begin(self._requests[row])
        request = self._requests[row]
        if request.seen != seen:
            raise RuntimeError(
                f"paged_eviction: a request goes on after {seen} tokens, of which {request.seen} were seen here. Was "
                "it moved here by a feature that loads blocks? Leave that feature out."
            )
        return request

    def _limits(self, request: Request, seen: int) -> Any:
        settings = self._settings
        assert settings is not None  # noqa: S101  (for mypy)
        if not settings.unequal:
            return np.full((1, 1), request.capacity)
        sizes = replace(request.sizes, spans=(request.spans,) if request.spans else ())
        shares = settings.shares(seen, sizes)
        own = [shares[layer.place] for layer in self._layers]
        heads = self.kv_cache_spec.num_kv_heads
        first = self._layers[0].local_heads.first_head(heads)
        return limits_of(own, self._sets, first, self.kv_cache_spec.kept, self.kv_cache_spec.block_size)

    def _make_table(self) -> None:
        settings, spec = self._settings, self.kv_cache_spec
        assert settings is not None  # noqa: S101  (for mypy)
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in self.layer_names]
        if layers[0].kv_cache.shape[2] != spec.block_size:
            raise RuntimeError(
                f"paged_eviction: this backend reads blocks of {layers[0].kv_cache.shape[2]} tokens. Start vLLM with "
                f"--block-size {layers[0].kv_cache.shape[2]}."
            )
        pages = [self.pages(layer.kv_cache, self._sets, layer, spec.head_size) for layer in layers]
        width = cdiv(self._widest(), spec.block_size) if settings.unequal else 1
        rows = self.vllm_config.scheduler_config.max_num_seqs
        self._table = Table(settings, self._layers, pages, self._sets, 2 * rows, width)
        for place, layer in enumerate(layers):
            layer.impl.evicts = place

    def _widest(self) -> int:
        """Most tokens that a set can have: all that the blocks of a request hold."""
        spec = self.kv_cache_spec
        return int(spec.kept * spec.block_size * self._sets)


class Evicting:
    """The plan, as the layers find it in their metadata.

    Attributes:
        step: the plan.
        layers: metadata of each layer, where sets differ.
        order: see `EvictingBuilder._order`.
    """

    def __init__(self, step: Step, layers: list[Any] | None, order: Tensor | None) -> None:
        self.step, self.layers, self.order = step, layers, order


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
        step = plan.step
        step.write(place, key, value)
        if plan.layers is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
        else:
            self._attend_sets(layer, query, key, value, plan, place, output)
        step.after(place, query, key, value, self._logits)
        return output

    def _attend_sets(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, plan: Evicting, place: int, output: Tensor
    ) -> None:
        """Attention of sequences of one set each."""
        pages = plan.step._table.pages[place].memory
        sets, count = plan.step._table.sets, plan.step._count
        parts = [part[:count].unflatten(1, (sets, -1)).flatten(0, 1) for part in (query, key, value)]
        if plan.order is None:
            out = output[:count].unflatten(1, (sets, -1)).flatten(0, 1)
        else:
            parts = [part[plan.order] for part in parts]
            out = torch.empty_like(parts[0])
        if self._of_set is None:
            self._of_set = copy.copy(self)
            self._of_set.evicts = None  # attention alone
            self._of_set.num_heads, self._of_set.num_kv_heads = self.num_heads // sets, self.num_kv_heads // sets
        assert plan.layers is not None  # noqa: S101  (for mypy)
        self._of_set.forward(layer, *parts, pages, plan.layers[place], out)
        if plan.order is not None:
            output[:count].unflatten(1, (sets, -1)).flatten(0, 1)[plan.order] = out

    @property
    def _logits(self) -> Logits:
        softcap = getattr(self, "logits_soft_cap", None) or None
        return Logits(self.scale, softcap, getattr(self, "sinks", None))
