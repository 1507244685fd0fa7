"""The requests of a group of layers: what the metadata of vLLM's batches says of them."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from hf_paged_eviction.internals import Layout, LiveRequest, RequestTable, Shares

from .heads import LocalShares, largest_part
from .pages import GroupPages, LayerPages
from .processor import answer_of, options_of, planned
from .settings import Settings
from .snapshots import State, Undo
from .spec import EvictionSpec
from .step import VllmStep

#: vLLM puts a block that belongs to no request here, into tables of batches that it makes up.
_NO_BLOCK = 0


class Group:
    """Plans the forwards of layers that have one table of blocks.

    Attributes:
        sets: sets of each layer.
        unequal: whether they hold different numbers of tokens.

    Args:
        spec: `EvictionSpec` of the layers.
        names: their names.
        config: `VllmConfig`.
        settings: what requests get.

    Raises:
        ValueError: the model cannot be served; the message says what to do.
    """

    def __init__(self, spec: Any, names: list[str], config: Any, settings: Settings) -> None:
        self._spec, self._config, self._settings = spec, config, settings
        self._layers = {name: extract_layer_index(name) for name in names}
        self.sets, self.unequal = spec.num_kv_heads if settings.separate else 1, settings.unequal
        if self.unequal and len(names) < len(settings.layers):
            raise ValueError(
                "paged_eviction: layers with budgets of their own share blocks, so all that evict must be in one "
                'process and in one group of vLLM. Use allocator="uniform".'
            )
        self._refuse(config.compilation_config.static_forward_context)
        planned.add(id(config))
        self._most = 2 * config.scheduler_config.max_num_seqs
        self._rows: dict[int, int] = {}  # by first block, least recently used first
        self._requests: dict[int, LiveRequest] = {}
        self._shares: dict[int, LocalShares] = {}
        self._table: RequestTable | None = None
        self._undo: Undo | None = None
        self._answers: dict[int, Any] = {}  # by row, to tell requests apart
        self._ended: dict[int, State] = {}  # by first block, of requests that have no row any more

    def _refuse(self, layers: Any) -> None:
        """Refuse models whose layers cannot evict."""
        own = layers[next(iter(self._layers))]
        if self._settings.unequal and getattr(own.impl, "sinks", None) is not None:
            raise ValueError(
                "paged_eviction: heads of this model have attention sinks of their own, but heads with budgets of "
                'their own are read one by one. Use allocator="uniform".'
            )
        for name, layer in layers.items():
            if getattr(layer, "kv_sharing_target_layer_name", None) in self._layers:
                raise ValueError(
                    f"paged_eviction: {name} of this model reads the keys and values of a layer that evicts, after "
                    "that has evicted. Use PagedEvictionCache with generate."
                )

    def step(self, common: Any, kind: type[LayerPages]) -> VllmStep | None:
        """The plan of a batch; None if vLLM made it up.

        Args:
            common: what vLLM tells the builder of its metadata.
            kind: how the backend lays out its blocks.
        """
        bounds = common.query_start_loc_cpu.tolist()
        seen = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
        # Requests are told apart by their rows in the table of runner V2, or by their first blocks.
        by_row = common.req_idx is not None
        keys = (common.req_idx if by_row else common.block_table_tensor[:, 0]).tolist()
        if not by_row and keys[0] == _NO_BLOCK:
            return None
        table = self._table or self._make_table(kind, common.block_table_tensor)
        step, brought = VllmStep(table, self._pages, self._undo), []
        for number, (key, length) in enumerate(zip(keys, seen.tolist(), strict=False)):
            count = bounds[number + 1] - bounds[number]
            if count > 0:
                row = key if by_row else self._row(key)
                blocks, at = common.block_table_tensor[number], key if by_row else number
                brought.append((self._request(row, length - count, at, blocks), number, count))
        if not brought:
            return None
        rows, numbers = [request.number for request, _, _ in brought], [number for _, number, _ in brought]
        self._pages.blocks[rows] = common.block_table_tensor[numbers].int()
        for request, _, count in brought:
            step.add(request, count)
        return step

    def _row(self, key: int) -> int:
        """The row of the request with this first block, which it keeps as long as it lives.

        vLLM does not tell a backend when a request ends. It schedules all running requests before it admits a new one,
        so of twice as many rows that which has not been used for the longest time is free.
        """
        row = self._rows.pop(key, None)
        if row is None:
            self._ended.pop(key, None)
            row = len(self._rows)
            if row == self._most:
                first = next(iter(self._rows))
                row = self._rows.pop(first)
                if self._undo is not None:
                    self._ended[first] = self._undo.state(self._requests[row])
        self._rows[key] = row
        return row

    def _request(self, row: int, seen: int, number: int, blocks: Tensor) -> LiveRequest:
        """The request in a row, which has seen so many tokens; `number` is what the processor knows it by."""
        known, answer = self._requests.get(row), answer_of(self._config, number)
        if seen == 0:
            return self._begin(row, number, answer)
        if self._undo is not None and (known is None or known.seen != seen or self._answers.get(row) is not answer):
            request = self._begin(row, number, answer)
            self._go_on(request, seen, blocks)
            return request
        if known is None or known.seen != seen:
            raise RuntimeError(
                f"paged_eviction: a request goes on after {seen} tokens, of which {known.seen if known else 0} were "
                "seen here. Was it moved here by a feature that loads blocks? Leave that feature out."
            )
        return known

    def _begin(self, row: int, number: int, answer: Any) -> LiveRequest:
        """A request takes a row."""
        table = self._table
        assert table is not None  # noqa: S101  (for mypy)
        options = options_of(self._config, number)
        budget, spans = options.within(self._settings.sizes)
        layout = Layout.equal(table.layers * table.sets, budget)
        request = LiveRequest(str(row), 0, self._shares_of(budget), layout, spans, row)
        self._requests[row], self._answers[row] = request, answer
        self._pages.begin(row)
        table.add(request, self._most)
        return request

    def _go_on(self, request: LiveRequest, seen: int, blocks: Tensor) -> None:
        """A request goes on from a snapshot, which vLLM has copied to its blocks."""
        table, undo, at = self._table, self._undo, seen // self._spec.block_size
        assert table is not None and undo is not None  # noqa: S101  (for mypy)
        self._pages.blocks[request.number] = blocks.int()
        if seen <= request.capacity:  # nothing was evicted, so all is in the order of the text
            text, rows = torch.arange(seen, device=table.device), torch.tensor([request.number], device=table.device)
            places = self._pages.places(rows, text[None, None])
            table.positions[places] = text.expand_as(places)
            request.seen = seen
            return
        source = int(blocks[at - 1])
        row = self._rows.get(source)
        state = self._ended.get(source) if row is None else undo.state(self._requests[row])
        if state is None:
            raise RuntimeError(f"paged_eviction: a request goes on from block {source}, which is not known here.")
        undo.take_back(request, state, seen)

    def _shares_of(self, budget: int) -> LocalShares:
        """The shares of requests with this budget."""
        if budget not in self._shares:
            settings, spec, layers = self._settings, self._spec, self._settings.layers
            first = next(iter(layers.values())).state.scorer.local_heads.first_head(spec.num_kv_heads)
            self._shares[budget] = LocalShares(
                settings.allocator,
                settings.sizes_for(budget),
                len(layers),
                self.sets,
                places=[[*layers].index(index) for index in self._layers.values()],
                heads=slice(first, first + self.sets),
                blocks=spec.kept(budget),
                slots=spec.block_size,
            )
        return self._shares[budget]

    def _make_table(self, kind: type[LayerPages], blocks: Tensor) -> RequestTable:
        """Called at the first batch, when vLLM has made its blocks."""
        settings, spec = self._settings, self._spec
        context = self._config.compilation_config.static_forward_context
        layers = [context[name] for name in self._layers]
        slots = layers[0].kv_cache.shape[2]
        if slots != spec.block_size:
            raise RuntimeError(
                f"paged_eviction: this backend reads blocks of {slots} tokens. Start vLLM with --block-size {slots}."
            )
        memory = kind([layer.kv_cache for layer in layers], self.sets, layers[0], spec.head_size)
        width = blocks.shape[1]
        self._pages = GroupPages(memory, len(layers), self.sets, self._most, width, spec.kept(), settings.unequal)
        own = [settings.layers[index] for index in self._layers.values()]
        self._table = RequestTable(settings.sizes, own, self._pages, self.sets)
        if spec.snapshots:
            self._undo = Undo(self._table, self._pages, spec.kept(), self._most)
        for place, layer in enumerate(layers):
            layer.impl.evicts = place
        return self._table


def spec_of(spec: Any, config: Any, settings: Settings) -> EvictionSpec:
    """The spec of a layer that evicts, for its stock spec."""
    parts, longest, part = config.parallel_config.tensor_parallel_size, config.model_config.max_model_len, 1.0
    heads = config.model_config.get_total_num_kv_heads()
    if settings.unequal and settings.separate and 1 < parts <= heads:
        part = largest_part(
            Shares(settings.allocator, settings.sizes, len(settings.layers), heads), heads, parts, longest
        )
    return EvictionSpec.of(
        spec,
        sizes=settings.sizes,
        unequal=settings.unequal,
        part=part,
        reserve=settings.reserve,
        in_flight=config.max_in_flight_tokens,
        longest=longest,
        snapshots=settings.snapshots
        and len(settings.layers) == config.model_config.get_num_layers(config.parallel_config),
    )
