"""The requests of a group of layers: what the metadata of vLLM's batches says of them."""

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from hf_paged_eviction.internals import Layout, LiveRequest, RequestTable, Shares

from .heads import LocalShares, largest_part
from .owners import Blocks, Holding, Owners
from .pages import GroupPages, LayerPages
from .processor import Shown, planned, shown
from .settings import Settings
from .snapshots import State, Undo
from .spec import EvictionSpec
from .step import VllmStep

logger = logging.getLogger("vllm.paged_eviction")

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
        if config.parallel_config.rank == 0 and id(config) not in planned:
            logger.info("%s", summary(spec, config, settings))
        planned.add(id(config))
        self._most = 2 * config.scheduler_config.max_num_seqs
        self._rows: dict[int, int] = {}  # by first block, least recently used first
        self._requests: dict[int, LiveRequest] = {}  # by row, as the next two
        self._answers: dict[int, Any] = {}
        self._holdings: dict[int, Holding] = {}
        self._parked: dict[int, State] = {}  # by first block, of requests that have no row any more
        self._prune_at = 2 * self._most
        self._shares: dict[int, LocalShares] = {}
        self._table: RequestTable | None = None
        self._undo: Undo | None = None

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
        blocks = common.block_table_tensor.cpu()
        keys = blocks[:, 0].tolist()
        if keys[0] == _NO_BLOCK:
            return None
        # By row of the batch, or of the table of requests of runner V2.
        of_processor = range(len(keys)) if common.req_idx is None else common.req_idx.tolist()
        table = self._table or self._make_table(kind, common.block_table_tensor)
        step, brought = VllmStep(table, self._pages, self._undo), []
        for number, (key, length) in enumerate(zip(keys, seen.tolist(), strict=False)):
            count = bounds[number + 1] - bounds[number]
            if count > 0:
                request = self._request(key, length - count, of_processor[number], blocks[number])
                self._check(request, blocks[number].numpy(), length)
                brought.append((request, number, count))
        if not brought:
            return None
        rows, numbers = [request.number for request, _, _ in brought], [number for _, number, _ in brought]
        self._pages.blocks[rows] = common.block_table_tensor[numbers].int()
        for request, _, count in brought:
            step.add(request, count)
        for entry in step.entries:
            if entry.layout is not None and self.unequal:
                self._check_layout(entry.request, entry.layout)
        return step

    # ---- what a forward touches -----------------------------------------------------------------------------------

    def _check(self, request: LiveRequest, blocks: Blocks, length: int) -> None:
        """See `Owners.check`."""
        slots, row = self._spec.block_size, request.number
        kept, entries = self._spec.kept(request.capacity), -(-length // slots)
        self._owners.check(self._holdings[row], blocks, kept, request.seen // slots, entries)

    def _check_layout(self, request: LiveRequest, layout: Layout) -> None:
        """Sets of different size have their pages in the blocks that a request keeps."""
        slots, kept = self._spec.block_size, self._spec.kept(request.capacity)
        pages = sum(-(-limit // slots) for limit in layout.limits)
        if pages > kept * len(layout.limits):
            raise RuntimeError(
                f"paged_eviction: after {request.seen} tokens the heads of request {request.id} need {pages} pages, "
                f"but its {kept} blocks have {kept * len(layout.limits)}. Please report this, with the options of the "
                'server. allocator="uniform" is not affected.'
            )

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _request(self, key: int, seen: int, number: int, blocks: Tensor) -> LiveRequest:
        """The request with this first block, which has seen so many tokens.

        Args:
            number: what the processor knows it by.
            blocks: its table of blocks, on the host.
        """
        known, row = shown(self._config, number), self._rows.pop(key, None)
        if row is None:
            row = self._free_row()
            if seen > 0 and key in self._parked:
                self._restore(row, self._parked.pop(key))
        self._rows[key] = row
        before = self._requests.get(row) if seen > 0 else None
        if before is not None and before.seen == seen and self._answers[row] is known.answer and self._has(row, blocks):
            return before
        if seen > 0 and self._undo is None:
            raise RuntimeError(
                f"paged_eviction: request {known.request_id} goes on after {seen} tokens, of which "
                f"{before.seen if before else 0} were seen here. Was it moved here by a feature that loads blocks? "
                "Leave that feature out."
            )
        return self._begin(row, seen, known, blocks)

    def _free_row(self) -> int:
        """A row for another request.

        vLLM does not tell a backend when a request ends. It schedules all running requests before it admits a new one,
        so of twice as many rows that which has not been used for the longest time belongs to a request that has ended,
        or to a session that waits for its next part.
        """
        if len(self._rows) < self._most:
            return len(self._rows)
        first = next(iter(self._rows))
        row = self._rows.pop(first)
        self._parked[first] = self._state(row)
        if len(self._parked) > self._prune_at:  # of the rest, no two share a block
            self._parked = {key: state for key, state in self._parked.items() if self._owners.is_intact(state.holding)}
            self._prune_at = 2 * max(self._most, len(self._parked))
        return row

    def _has(self, row: int, blocks: Tensor) -> bool:
        """Whether the request in a row keeps these blocks."""
        kept = self._holdings[row].kept
        return bool((blocks[: len(kept)].numpy() == kept).all())

    def _state(self, row: int) -> State:
        """What is known of the request in a row.

        Of one that has evicted nothing that is little: its sets are equal, and its snapshot depends on its text alone.
        So all states together have a hundredth of the bytes of the blocks, at most.
        """
        assert self._table is not None  # noqa: S101  (for mypy)
        request = self._requests[row]
        evicts = request.seen >= request.capacity
        own, undo = (self._pages.own, self._undo) if evicts else (None, None)
        return State(
            request,
            self._answers[row],
            self._holdings[row],
            self._pages.blocks[row].clone(),
            None if own is None else own[row].clone(),
            self._table.block[row].clone(),
            None if undo is None else undo.noted(request),
        )

    def _restore(self, row: int, state: State) -> None:
        """A request that has waited takes a row."""
        assert self._table is not None  # noqa: S101  (for mypy)
        self._requests[row], self._answers[row], self._holdings[row] = state.request, state.answer, state.holding
        state.request.number = row
        self._pages.begin(row)
        if self._pages.own is not None and state.own is not None:
            self._pages.own[row, :, : state.own.shape[-1]] = state.own
        self._table.block[row] = state.block
        self._table.give_row(state.request)
        if self._undo is not None and state.noted is not None:
            self._undo.restore(row, state.noted)

    def _begin(self, row: int, seen: int, known: Shown, blocks: Tensor) -> LiveRequest:
        """A request takes a row; with tokens seen, it goes on from a snapshot, which vLLM has copied to its blocks."""
        table, slots = self._table, self._spec.block_size
        assert table is not None  # noqa: S101  (for mypy)
        (budget, spans), name = known.options.within(self._settings.sizes), known.request_id or str(row)
        source = self._source(seen, budget, blocks, name) if seen >= budget else None
        layout = Layout.equal(table.layers * table.sets, budget)
        request = LiveRequest(name, 0, self._shares_of(budget), layout, spans, row)
        self._requests[row], self._answers[row] = request, known.answer
        kept = blocks[: min(self._spec.kept(budget), seen // slots)].numpy()
        self._holdings[row] = self._owners.begin(kept, seen // slots, name)
        self._pages.begin(row)
        table.add(request, self._most)
        if seen:
            self._pages.blocks[row] = blocks.int()
        if source is not None and self._undo is not None:
            self._undo.take_back(request, source, seen)
        elif seen:  # nothing was evicted, so all is in the order of the text
            text, rows = torch.arange(seen, device=table.device), torch.tensor([row], device=table.device)
            places = self._pages.places(rows, text[None, None])
            table.positions[places] = text.expand_as(places)
            request.seen = seen
        return request

    def _source(self, seen: int, budget: int, blocks: Tensor, name: str) -> State | None:
        """The state of the request whose snapshot another one goes on from; None = nothing was evicted of it."""
        count = seen // self._spec.block_size
        if count <= self._spec.kept(budget):  # the scheduler keeps no such snapshot once something was evicted
            return None
        first = int(blocks[count - 1])  # the scheduler has left a word in an entry that nothing reads
        row = self._rows.get(first)
        state = self._parked.get(first) if row is None else self._state(row)
        if state is not None:
            return state
        raise RuntimeError(
            f"paged_eviction: request {name} goes on after {seen} tokens from a snapshot that is not known here. Was "
            'it moved here by a feature that loads blocks? Leave that feature out, or use {"snapshots": false}.'
        )

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
        memory = kind(layers, self.sets, spec.head_size, self._config.model_config.dtype)
        width = blocks.shape[1]
        self._pages = GroupPages(memory, len(layers), self.sets, self._most, width, spec.kept(), settings.unequal)
        self._owners = Owners(len(layers[0].kv_cache))
        own = [settings.layers[index] for index in self._layers.values()]
        self._table = RequestTable(settings.sizes, own, self._pages, self.sets)
        if spec.snapshots:
            self._undo = Undo(self._table, self._pages, spec.kept(), self._most)
        for place, layer in enumerate(layers):
            layer.impl.evicts = place
        return self._table


def summary(spec: EvictionSpec, config: Any, settings: Settings) -> str:
    """What a server does, in one line."""
    kept, slots = spec.kept(), spec.block_size
    snapshots = "on" if settings.no_snapshots is None else f"off ({settings.no_snapshots})"
    return (
        f"paged_eviction: policy {settings.policy.label}, {settings.budget} tokens per request and layer, allocator "
        f"{settings.allocator.label}, profile {settings.profile}; a request keeps {kept} blocks of {slots} tokens, "
        f"with at most {spec.most_blocks(spec.longest)} while a chunk is read (its text alone would be up to "
        f"{-(-spec.longest // slots)}); snapshots {snapshots}."
    )


def spec_of(spec: Any, config: Any, settings: Settings) -> EvictionSpec:
    """The spec of a layer that evicts, for its stock spec."""
    parts, longest = config.parallel_config.tensor_parallel_size, config.model_config.max_model_len
    heads = config.model_config.get_total_num_kv_heads()
    if settings.part is None:
        divides = settings.unequal and settings.separate and 1 < parts <= heads
        shares = Shares(settings.allocator, settings.sizes, len(settings.layers), heads)
        settings.part = largest_part(shares, heads, parts, longest) if divides else 1.0
    return EvictionSpec.of(
        spec,
        sizes=settings.sizes,
        unequal=settings.unequal,
        part=settings.part,
        reserve=settings.reserve,
        in_flight=config.max_in_flight_tokens,
        longest=longest,
        snapshots=settings.no_snapshots is None,
    )
