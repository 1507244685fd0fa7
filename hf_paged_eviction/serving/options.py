"""The options of `paged_batching`, checked."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from ..allocators import FixedAllocator
from ..cache import PagedEvictionCache
from ..layer.paged import PagedLayer
from ..naming.sizes import parse_bytes
from ..options.cache_options import CacheOptions
from ..policies import EvictionPolicy
from ..queries.attention import shown_queries
from ..table.budget import BlockBudget, whole_number
from ..table.spans import Spans, read_spans
from .contexts import ServedContext

#: Default number of live requests that pages are allocated for on a CPU.
_LIVE_ON_CPU = 16
#: Default number of tokens per page; fewer if the budget is smaller.
_PAGE_SIZE = 256


@dataclass(frozen=True)
class ServingOptions:
    """Budget, policy and allocator of the requests.

    Attributes:
        sizes: budget and protected tokens of each request and layer.
        policy: the policy.
        allocator: divides the budget among layers and KV heads.
        prefill_chunk_size: prompts are cut after every so many tokens, and nowhere else.
        prefix_bytes: bytes for beginnings of prompts that may come again.
        layers: the layers that evict, by index in the model; they score tokens and hold none.
        alone: makes the cache of one request, for a budget.
    """

    sizes: BlockBudget
    policy: EvictionPolicy
    allocator: FixedAllocator
    prefill_chunk_size: int
    prefix_bytes: int
    layers: dict[int, PagedLayer]
    alone: Callable[[int], PagedEvictionCache]
    _sizes: dict[int, BlockBudget] = field(default_factory=dict)

    @classmethod
    def check(
        cls, config: Any, *, prefill_chunk_size: int = 512, prefix_cache: str | int | None = "256MiB", **options: Any
    ) -> "ServingOptions":
        """Check the user's options, as `PagedEvictionCache` does.

        Args:
            config: `model.config`.
            options: options of a cache; unsupported ones must have their defaults.

        Raises:
            TypeError, ValueError: an option is not valid or not supported; the message says what to do instead.
        """
        unasked = {name: options.pop(name) for name in _UNASKED if name in options}
        user_options = CacheOptions(**options)
        if user_options.budget is None:
            raise ValueError("budget= (tokens held per request and layer) is needed: pages are reserved for it.")
        _refuse_positions(user_options.positions)
        _refuse_others(user_options, unasked)

        def of_budget(budget: int) -> PagedEvictionCache:
            return _alone(config, options | {"budget": budget})

        alone = of_budget(user_options.budget)  # type: ignore[arg-type]
        _refuse_policy(alone.policy)
        allocator = alone.allocator
        if not isinstance(allocator, FixedAllocator):
            raise ValueError(
                f"The allocator {allocator.name!r} decides by each prompt how many tokens a layer or head may hold, "
                "while the prompt is read. Continuous batching must know it before: use "
                "allocator='heads:PROFILE' (paged-eviction prepare), 'pyramid' or 'uniform', or PagedEvictionCache "
                "with generate."
            )
        layers = dict(alone.paged_layers)
        if not layers:
            raise ValueError(
                f"No layer of this {config.model_type} model can evict: all hold a fixed number of tokens "
                "already. Use its continuous batching as it is."
            )
        sizes = next(iter(layers.values())).budget
        chunk = whole_number("prefill_chunk_size", prefill_chunk_size, 1)
        prefix_bytes = 0 if prefix_cache is None else parse_bytes(prefix_cache)
        return cls(sizes, alone.policy, allocator, chunk, prefix_bytes, layers, of_budget)

    @property
    def budget(self) -> int:
        """Number of tokens held per request and layer."""
        return self.sizes.capacity

    @property
    def separate(self) -> bool:
        """Whether each KV head evicts its own tokens."""
        return next(iter(self.layers.values())).heads == "separate"

    def sizes_of(self, budget: int | None, context: ServedContext | None = None) -> BlockBudget:
        """The sizes of a request with its own budget; None = the common budget.

        Args:
            context: context that the request continues from.

        Raises:
            TypeError, ValueError: the budget is not valid, exceeds the common budget, or differs from that of the
                context.
        """
        if budget is None or budget == self.budget:
            return self.sizes
        if context is not None:
            raise ValueError(
                f"budget={budget}, but the context was read with a budget of {self.budget} tokens. Leave budget= out."
            )
        if budget not in self._sizes:
            self._sizes[budget] = self._checked(budget)
        return self._sizes[budget]

    def _checked(self, budget: int) -> BlockBudget:
        if whole_number("budget", budget, 1) > self.budget:
            raise ValueError(
                f"budget={budget} is more than {self.budget}, the budget of paged_batching. Ask for at most "
                f"{self.budget} tokens, or leave budget= out."
            )
        alone = self.alone(budget)
        if (alone.policy, alone.allocator.label) != (self.policy, self.allocator.label):
            raise ValueError(
                f"budget={budget} is too small for {self.policy.label} with {self.allocator.label}. Ask for more "
                "tokens, or leave budget= out."
            )
        return next(iter(dict(alone.paged_layers).values())).state.budget.mean

    def spans(self, protect: Any = None, context: ServedContext | None = None, budget: int | None = None) -> Spans:
        """The protected spans of a request, its start and the spans of its context included.

        Args:
            protect: spans of the tokens after the context.
            budget: its own budget, if it has one.

        Raises:
            TypeError, ValueError: the spans are not valid, or the budget is not valid or too small for them.
        """
        rows = read_spans(protect)
        if len(rows) > 1:
            raise TypeError(f"protect= has spans for {len(rows)} rows; a request is one: give pairs (start, end).")
        seen, before = (0, ()) if context is None else (context.seen, context.spans)
        own = [(seen + start, seen + end) for row in rows for start, end in row]
        sizes = self.sizes_of(budget, context).protecting([*before, *own] if own else None)
        return self.sizes.start_and(sizes.spans[0] if own else before)

    def pages(self, page_size: int, tokens: int | None = None, budget: int | None = None) -> int:
        """Largest number of pages of a request with at most so many tokens."""
        budget = self.budget if budget is None else budget
        return ceil((budget if tokens is None else min(budget, tokens)) / page_size)

    # ---- transformers' own configuration --------------------------------------------------------------------------

    def configure(
        self, config: ContinuousBatchingConfig | None, device: torch.device | str
    ) -> ContinuousBatchingConfig:
        """Make the configuration of continuous batching; the user's object does not change.

        Raises:
            ValueError: an option would change answers; the message gives the reason.
        """
        if config is None:
            config = ContinuousBatchingConfig(page_size=min(self.budget, _PAGE_SIZE), allow_block_sharing=False)
        else:
            config = deepcopy(config)
        for refused, reason in _refusals(config):
            if refused:
                raise ValueError(f"{reason} Leave that option out of the ContinuousBatchingConfig.")
        config.allow_block_sharing = False  # tokens of these pages may be evicted; `Prefixes` shares what can be shared
        config.use_async_batching = False
        config.use_cuda_graph = False
        config.max_blocks_per_request = 0
        if config.safety_margin is None:
            config.safety_margin = 0.0  # pages are reserved, so a margin of free pages would stay unused
        if torch.device(device).type == "cpu" and config.max_memory_percent is None:
            self._bound_memory(config)
        self.check_room(config)
        return config

    def _bound_memory(self, config: ContinuousBatchingConfig) -> None:
        """Fill in what would otherwise be worked out from 60 % of the machine's memory."""
        live = min(config.max_requests_per_batch or _LIVE_ON_CPU, _LIVE_ON_CPU)
        if config.num_blocks is None:
            config.num_blocks = live * self.pages(config.page_size)
        if config.max_batch_tokens is None:
            config.max_batch_tokens = self.prefill_chunk_size + live

    def check_room(self, config: ContinuousBatchingConfig) -> None:
        """Refuse a cache or a batch that is too small for one request.

        Raises:
            ValueError: too small; the message says what is enough.
        """
        pages = self.pages(config.page_size)
        if config.num_blocks is not None and config.num_blocks < pages:
            raise ValueError(
                f"num_blocks={config.num_blocks} pages of {config.page_size} tokens hold no request of "
                f"{self.budget} tokens, which needs {pages}. Set num_blocks to at least {pages} times the number of "
                "requests that should be live at once, or choose a smaller budget."
            )
        if config.max_batch_tokens is not None and config.max_batch_tokens < self.prefill_chunk_size:
            raise ValueError(
                f"max_batch_tokens={config.max_batch_tokens} is less than prefill_chunk_size="
                f"{self.prefill_chunk_size}, and prompts are cut every {self.prefill_chunk_size} tokens and nowhere "
                "else. Set max_batch_tokens to at least the chunk plus one token per live request, or use smaller "
                "chunks."
            )


def _alone(config: Any, options: dict[str, Any]) -> PagedEvictionCache:
    """What a request is given alone; an allocator that nobody asked for is one that is served."""
    with warnings.catch_warnings(), shown_queries(config):
        warnings.simplefilter("ignore")  # these warnings are about `generate`
        cache = PagedEvictionCache(config, **options)
        if options.get("allocator") is None and not isinstance(cache.allocator, FixedAllocator):
            cache = PagedEvictionCache(config, **options | {"allocator": "uniform"})
        return cache


def _refusals(config: ContinuousBatchingConfig) -> list[tuple[bool, str]]:
    """What the user may have asked for and cannot have: whether, and why."""
    graphs = config.use_cuda_graph
    padded = config.q_padding_interval_size or config.kv_padding_interval_size
    compiled = config.varlen_compile_config or config.decode_compile_config or config.default_compile_level
    return [
        (
            any(graphs) if isinstance(graphs, tuple) else bool(graphs or padded),
            "CUDA graphs write to fixed addresses, but the slots that a layer writes to are chosen while a step runs.",
        ),
        (bool(compiled), "Compiled steps are padded to fixed lengths, and eviction does not handle the padding."),
        (
            bool(config.use_async_batching),
            "Asynchronous batching prepares a step while the previous one runs, but what a step reads and overwrites "
            "is known only when the previous one has ended.",
        ),
        (
            bool(config.max_blocks_per_request),
            "With block tables (max_blocks_per_request) the attention kernel appends new tokens to a request, but here "
            "they overwrite evicted ones.",
        ),
        (
            config.cpu_offload_space is None or config.cpu_offload_space > 0,
            "No request is ever preempted, so there is nothing to offload (cpu_offload_space).",
        ),
        (
            config.scheduler_type != "fifo",
            f"scheduler_type={config.scheduler_type!r} cuts prompts where a batch is full, so an answer would depend "
            "on other requests. The only scheduler with fixed cuts is 'fifo'.",
        ),
    ]


def _refuse_policy(policy: EvictionPolicy) -> None:
    needs, reason = policy.needs, None
    if needs.by_probe:
        reason = "runs queries of its own after each prompt, which continuous batching does not"
    elif needs.decision_interval > 1:
        reason = f"evicts every {needs.decision_interval} tokens, but pages evict one block at a time"
    if reason is not None:
        raise ValueError(
            f"The policy {policy.label!r} {reason}. Use another one, such as 'keydiff', 'snapkv' or "
            "'calibrated:FILE', or PagedEvictionCache with generate."
        )


def _refuse_positions(positions: str) -> None:
    if positions == "cache":
        raise ValueError(
            'Continuous batching does not support positions="cache": pages hold keys rotated to their positions in the '
            'text. Use positions="text" and keep prompt and answer together within the model\'s window, or use '
            'PagedEvictionCache(..., positions="cache") with generate.'
        )
    if positions != "text":
        raise ValueError(f'positions must be "text", got {positions!r}.')


#: Arguments of `PagedEvictionCache` that are not options.
_UNASKED = ("attention_mask",)
#: Options that continuous batching does not support, with the reasons.
_UNSERVED = {
    "bits": "pages hold keys and values in the model's own dtype",
    "disposal": "evicted tokens are overwritten",
    "static": "its steps are not compiled",
    "attention_mask": "requests have no padding",
    "protect": "spans belong to one text. Give each request its own, manager.add_request(..., protect=[(start, end)]); "
    "sink_tokens= protects the beginning of every request",
}


def _refuse_others(user_options: CacheOptions, unasked: dict[str, Any]) -> None:
    budget = user_options.budget
    if isinstance(budget, str) and not budget.strip().isdecimal():
        raise ValueError(
            f"Continuous batching does not support budget={budget!r}: pages are reserved by tokens, before a "
            "prompt is read. Give budget= as a number of tokens, and num_blocks in ContinuousBatchingConfig."
        )
    settings, usually = vars(user_options) | unasked, vars(CacheOptions())
    for name, reason in _UNSERVED.items():
        value, usual = settings.get(name), usually.get(name)
        if value is not usual and value != usual:
            raise ValueError(
                f"Continuous batching does not support {name}={value!r}: {reason}. Leave {name}= out, or use "
                f"PagedEvictionCache(..., {name}=...) with generate."
            )


def refuse_parallel(model: Any) -> None:
    """Refuse a model that is split over processes."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() > 1:
        raise ValueError(
            f"This model is split over {mesh.size()} processes (tensor parallelism). It is not tested whether all of "
            "them would evict the same tokens in continuous batching. Run one server per device, behind a router."
        )
