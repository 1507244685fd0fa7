"""The options of `paged_batching`, checked."""

from copy import deepcopy
from math import ceil
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from hf_paged_eviction.internals import Setup, head_dim, parse_bytes, whole_number

from .records import RecordLayout

#: Default number of live requests that pages are allocated for on a CPU.
_LIVE_ON_CPU = 16
#: Tokens that a page holds by default; fewer if the budget is smaller.
_PAGE_SIZE = 256


class ServingOptions(Setup):
    """The options of continuous batching.

    Attributes:
        prefill_chunk_size: prompts are cut after every so many tokens, and nowhere else.
        prefix_bytes: bytes for beginnings of prompts that may come again.

    Args:
        config, options: see `Setup`.
        prefill_chunk_size, prefix_cache: see `paged_batching`.
    """

    server = "Continuous batching"
    unserved = {  # noqa: RUF012  (of the class)
        "disposal": "evicted tokens are overwritten",
        "static": "its steps are not compiled",
        "protect": "spans belong to one text. Give each request its own, manager.add_request(..., protect=[(start, "
        "end)]); sink_tokens= protects the beginning of every request",
    }

    def __init__(
        self, config: Any, *, prefill_chunk_size: int = 512, prefix_cache: str | int | None = "256MiB", **options: Any
    ) -> None:
        super().__init__(config, options)
        coders = [layer.store.coder for layer in self.layers.values()]
        first = next(iter(self.layers))
        heads = self.layers[first].state.scorer.local_heads.total
        dim = head_dim(config.get_text_config(decoder=True), first)
        heads = 1 if self.separate else heads or 1
        self._records = [RecordLayout.of(coder.codecs, heads, dim) for coder in coders if coder.rounds]
        self.prefill_chunk_size = whole_number("prefill_chunk_size", prefill_chunk_size, 1)
        self.prefix_bytes = 0 if prefix_cache is None else parse_bytes(prefix_cache)

    def pages(self, page_size: int, tokens: int | None = None, budget: int | None = None) -> int:
        """Largest number of pages of a request with at most so many tokens."""
        budget = self.budget if budget is None else budget
        return ceil((budget if tokens is None else min(budget, tokens)) / page_size)

    def page_tokens(self, page_size: int, dtype: torch.dtype) -> int:
        """Number of tokens of each layer whose keys and values a page for `page_size` tokens of this dtype holds: more
        in few bits."""
        return self._records[0].per_page(page_size, dtype.itemsize) if self._records else page_size

    def page_size(self, dtype: torch.dtype) -> int:
        """The default of `page_size`, for which a page holds 256 tokens, or all of a smaller budget."""
        tokens = min(self.budget, _PAGE_SIZE)
        return ceil(tokens * tokens / self.page_tokens(tokens, dtype))

    # ---- transformers' own configuration --------------------------------------------------------------------------

    def configure(
        self, config: ContinuousBatchingConfig | None, device: torch.device | str, dtype: torch.dtype
    ) -> ContinuousBatchingConfig:
        """Make the configuration of continuous batching; the user's object does not change.

        Args:
            device, dtype: of the model.

        Raises:
            ValueError: an option would change answers; the message gives the reason.
        """
        if config is None:
            config = ContinuousBatchingConfig(page_size=self.page_size(dtype), allow_block_sharing=False)
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
            self._bound_memory(config, dtype)
        self.check_room(config, dtype)
        return config

    def _bound_memory(self, config: ContinuousBatchingConfig, dtype: torch.dtype) -> None:
        """Fill in what would otherwise be worked out from 60 % of the machine's memory."""
        live = min(config.max_requests_per_batch or _LIVE_ON_CPU, _LIVE_ON_CPU)
        if config.num_blocks is None:
            config.num_blocks = live * self.pages(self.page_tokens(config.page_size, dtype))
        if config.max_batch_tokens is None:
            config.max_batch_tokens = self.prefill_chunk_size + live

    def check_room(self, config: ContinuousBatchingConfig, dtype: torch.dtype) -> None:
        """Refuse a cache or a batch that is too small for one request.

        Raises:
            ValueError: too small; the message says what is enough.
        """
        tokens = self.page_tokens(config.page_size, dtype)
        pages = self.pages(tokens)
        if config.num_blocks is not None and config.num_blocks < pages:
            raise ValueError(
                f"num_blocks={config.num_blocks} pages of {tokens} tokens hold no request of "
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
