"""The setting `paged_eviction` of a server, checked against its model and against what else vLLM was asked to do."""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from hf_paged_eviction.internals import BlockBudget, Setup, Uniform

from .contract import check_vllm

logger = logging.getLogger("vllm.paged_eviction")

NAME = "paged_eviction"


class Settings(Setup):
    """What every request gets.

    Attributes:
        reserve: whether a request is admitted only if the blocks of its budget are free, so that none is preempted.

    Args:
        config: the model's configuration (transformers).
        setting: options of a cache, and `reserve`.

    Raises:
        TypeError, ValueError: it is not valid or cannot be served; the message says what would be.
    """

    server = "vLLM"
    unserved = {  # noqa: RUF012  (of the class)
        "bits": "its blocks hold keys and values in one type; --kv-cache-dtype is not supported together with eviction",
        "disposal": "evicted tokens are overwritten",
        "static": "it captures its own graphs",
        "protect": "spans belong to one text. Give each request its own, "
        "extra_args={'paged_eviction_protect': [[0, 64]]}",
    }

    def __init__(self, config: Any, setting: Mapping[str, Any]) -> None:
        if not isinstance(setting, Mapping):
            raise TypeError(f'{NAME} is a table of settings such as {{"budget": 1024}}, got {setting!r}.')
        options = dict(setting)
        self.reserve: bool = options.pop("reserve", True)
        if not isinstance(self.reserve, bool):
            raise TypeError(f"{NAME}.reserve is true or false, got {self.reserve!r}.")
        super().__init__(config, options)
        if options.get("policy", "auto") == "auto":
            logger.warning(
                "No policy is named, so %s evicts. A profile of `paged-eviction prepare` keeps more answers: "
                '{"profile": "FILE", "policy": "calibrated", "allocator": "heads"}.',
                self.policy.label,
            )

    @property
    def unequal(self) -> bool:
        """Whether layers or heads hold different numbers of tokens."""
        return not isinstance(self.allocator, Uniform)

    @property
    def snapshots(self) -> bool:
        """Whether what a request holds can be kept: what a policy knows of queries cannot be taken back."""
        return not self.policy.needs.queries

    def sizes_for(self, budget: int) -> BlockBudget:
        """As `sizes_of`, for a budget within bounds; nothing is refused any more when a request runs."""
        try:
            return self.sizes_of(budget)
        except ValueError as error:
            logger.warning("%s Served with the policy of the server.", error)
            return self.sizes.of(budget)


def _refusals(config: Any) -> dict[str, bool]:
    """What a server may have been asked for and cannot have together with eviction, with the way out."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    layers = getattr(model.hf_text_config, "layer_types", None) or ()
    return {
        "Speculative decoding takes tokens back, and by then others have been evicted for them. Leave out "
        "--speculative-config.": config.speculative_config is not None,
        "KV transfer moves blocks by the tokens of the text, but the tokens of these blocks are evicted. Leave out "
        "--kv-transfer-config.": config.kv_transfer_config is not None,
        f"Scores need keys and values, not codes. Leave out --kv-cache-dtype {cache.cache_dtype}.": (
            str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32")
        ),
        "Latents (MLA) have one block for keys and values of all heads. Use a model without MLA.": model.use_mla,
        "Cross attention holds the encoder's tokens. Use a decoder.": model.is_encoder_decoder,
        "Nothing is generated, so nothing is evicted. Use --runner generate.": model.runner_type != "generate",
        "Images of this model attend to later tokens, and evicted ones are gone by then. Use another model.": (
            model.is_mm_prefix_lm
        ),
        "Context parallelism divides a text among processes, and a policy needs all of it. Use "
        "--tensor-parallel-size.": (
            parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "Half batches would plan twice. Leave out --enable-dbo.": getattr(parallel, "enable_dbo", False),
        "Layers that share keys read a part of the prompt only. Leave out --kv-sharing-fast-prefill.": (
            getattr(cache, "kv_sharing_fast_prefill", False)
        ),
        "Sliding layers would hold all tokens. Leave out --disable-hybrid-kv-cache-manager.": (
            config.scheduler_config.disable_hybrid_kv_cache_manager and any(kind != "full_attention" for kind in layers)
        ),
    }


_latest: tuple["weakref.ref[Any]", Settings | None] | None = None


def settings_of(config: Any) -> Settings | None:
    """The settings of a server, checked once; None if it does not evict.

    Args:
        config: its `VllmConfig`.

    Raises:
        TypeError, ValueError: something cannot be served; the message says what to do.
    """
    global _latest
    if _latest is None or _latest[0]() is not config:
        additional = config.additional_config
        setting = additional.get(NAME) if isinstance(additional, Mapping) else None
        _latest = weakref.ref(config), None if setting is None else _checked(config, setting)
    return _latest[1]


def _checked(config: Any, setting: Any) -> Settings:
    check_vllm()
    for reason, refused in _refusals(config).items():
        if refused:
            raise ValueError(f"{NAME}: {reason}")
    settings = Settings(config.model_config.hf_config, setting)
    if config.parallel_config.tensor_parallel_size > 1 and not settings.separate:
        raise ValueError(
            f'{NAME}: with heads="shared" the mean over all KV heads decides, and tensor parallelism divides them over '
            'processes. Use {"heads": "separate"}.'
        )
    return settings


def latest() -> tuple[Any, Settings | None]:
    """The server whose settings were asked for last in this process, and these."""
    return (None, None) if _latest is None else (_latest[0](), _latest[1])
