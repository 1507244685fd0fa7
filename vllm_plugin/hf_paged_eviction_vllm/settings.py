"""The setting `paged_eviction` of a server, checked against its model and against what else vLLM was asked to do."""

import logging
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_paged_eviction import CacheOptions, EvictionPolicy, PagedEvictionCache
from hf_paged_eviction.internals import (
    BlockBudget,
    FixedAllocator,
    Heads,
    LocalHeads,
    Rotary,
    Scorer,
    Uniform,
    fixed_shares,
    shown_queries,
)

from .contract import check_vllm

logger = logging.getLogger("vllm.paged_eviction")

NAME = "paged_eviction"
#: Options of a cache that a server takes.
_OPTIONS = ("budget", "block_size", "policy", "heads", "sink_tokens", "recent_tokens", "allocator")
#: Options of a cache that it does not take, with the reason.
_UNSERVED = {
    "bits": "vLLM's blocks hold keys and values in one type; --kv-cache-dtype is not supported together with eviction",
    "disposal": "evicted tokens are overwritten",
    "positions": "positions are vLLM's, those of the text",
    "static": "vLLM captures its own graphs",
    "protect": "spans belong to one text: give each request its own, extra_args={'paged_eviction_protect': [[0, 64]]}",
}
#: The setting that is not an option of a cache.
_RESERVE = "reserve"


@dataclass(frozen=True)
class Layer:
    """A layer that evicts.

    Attributes:
        index: its index in the model.
        place: its index among the layers that evict.
        local_heads: the KV heads that this process holds.
        rotary: its rotation, if the policy needs it.
    """

    index: int
    place: int
    local_heads: LocalHeads
    rotary: Rotary | None


@dataclass(frozen=True)
class Settings:
    """What every request gets.

    Attributes:
        sizes: budget, block and protected tokens of each layer.
        policy: scores tokens.
        allocator: divides the budget among layers and KV heads.
        separate: whether each KV head evicts its own tokens.
        layers: the layers that evict, by index in the model.
        reserve: whether a request is admitted only if the blocks of its budget are free, so that none is preempted.
    """

    sizes: BlockBudget
    policy: EvictionPolicy
    allocator: FixedAllocator
    separate: bool
    layers: dict[int, Layer]
    reserve: bool

    @classmethod
    def check(cls, config: Any, setting: Mapping[str, Any]) -> "Settings":
        """Check the setting for a model.

        Args:
            config: the model's configuration (transformers).

        Raises:
            TypeError, ValueError: it is not valid or cannot be served; the message says what would be.
        """
        if not isinstance(setting, Mapping):
            raise TypeError(f'{NAME} is a table of settings such as {{"budget": 1024}}, got {setting!r}.')
        reserve = setting.get(_RESERVE, True)
        if not isinstance(reserve, bool):
            raise TypeError(f"{NAME}.{_RESERVE} is true or false, got {reserve!r}.")
        options = {name: value for name, value in setting.items() if name != _RESERVE}
        _refuse_names(options)
        cache = _alone(config, options)
        _refuse_policy(cache.policy)
        layers = cache.paged_layers
        if not layers:
            raise ValueError(
                f"No layer of this {config.model_type} model can evict: all hold a fixed number of tokens already. "
                f"Leave {NAME} out."
            )
        first = layers[0][1]
        evicting = {
            index: Layer(index, place, layer.local_heads, layer.rotary) for place, (index, layer) in enumerate(layers)
        }
        allocator = cache.allocator
        if not isinstance(allocator, FixedAllocator):
            raise ValueError(
                f"The allocator {allocator.name!r} decides by each prompt how many tokens a layer or head may hold, "
                "but blocks are reserved before. Use allocator='heads:PROFILE' (paged-eviction prepare), 'pyramid' or "
                "'uniform'."
            )
        return cls(first.budget, cache.policy, allocator, first.heads == "separate", evicting, reserve)

    @property
    def budget(self) -> int:
        """Number of tokens held per request and layer, averaged over layers and heads."""
        return self.sizes.capacity

    @property
    def unequal(self) -> bool:
        """Whether layers or heads hold different numbers of tokens."""
        return not isinstance(self.allocator, Uniform)

    @cached_property
    def foreseen(self) -> int | None:
        """Times the budget: the text for which shares are computed when single tokens fill it; None = shares stay."""
        return self.allocator.foreseen

    def shares(self, seen: int, sizes: BlockBudget) -> list[torch.Tensor]:
        """Tokens `[1 or KV heads of the model]` of each layer that evicts, after so many tokens."""
        real = torch.tensor([seen], device="cpu")
        return [share[0] for share in fixed_shares(self.allocator, len(self.layers), sizes, real)]

    def scorer(self, layer: Layer) -> Scorer:
        """Scores the tokens of a layer."""
        heads: Heads = "separate" if self.separate else "shared"
        return Scorer(self.policy, heads, layer.index, layer.local_heads, layer.rotary)


def _refuse_names(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _UNSERVED:
            raise ValueError(f"{NAME}.{name}={value!r} is not served inside vLLM: {_UNSERVED[name]}. Leave it out.")
        if name not in _OPTIONS:
            raise ValueError(f"{NAME}.{name} is unknown. Known settings: {', '.join([*_OPTIONS, _RESERVE])}.")
    if "budget" not in options:
        raise ValueError(f'{NAME} needs a budget, the tokens held per request and layer: {{"budget": 1024}}.')
    budget = options["budget"]
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(
            f"{NAME}.budget={budget!r} must be a number of tokens: blocks are reserved before a prompt is read. "
            "`paged-eviction plan` says how many tokens a number of bytes holds."
        )


def _alone(config: Any, options: Mapping[str, Any]) -> PagedEvictionCache:
    """The cache that a request would get alone; an allocator that nobody asked for is one that is served."""
    given = vars(CacheOptions(**options))
    with warnings.catch_warnings(record=True) as caught, shown_queries(config):
        warnings.simplefilter("always")
        cache = PagedEvictionCache(config, **given)
        if options.get("allocator") is None and not isinstance(cache.allocator, FixedAllocator):
            cache = PagedEvictionCache(config, **given | {"allocator": "uniform"})
    if options.get("policy", "auto") == "auto":
        for warning in caught:
            logger.warning("%s", warning.message)
    return cache


def _refuse_policy(policy: EvictionPolicy) -> None:
    needs, reason = policy.needs, None
    if needs.by_probe:
        reason = "runs queries of its own after each prompt, which vLLM does not"
    elif needs.decision_interval > 1:
        reason = f"evicts every {needs.decision_interval} tokens, and here one block goes at a time"
    if reason is not None:
        raise ValueError(f"The policy {policy.label!r} {reason}. Use another one, such as 'keydiff' or 'snapkv'.")


# ---- of a server -----------------------------------------------------------------------------------------------------


def _refusals(config: Any) -> list[tuple[bool, str]]:
    """What a server may have been asked for and cannot have together with eviction: whether, and why."""
    parallel, cache, model, scheduler = (
        config.parallel_config,
        config.cache_config,
        config.model_config,
        config.scheduler_config,
    )
    return [
        (
            config.speculative_config is not None,
            "Speculative decoding takes tokens back, and by then others have been evicted for them. Leave out "
            "--speculative-config.",
        ),
        (
            config.kv_transfer_config is not None,
            "KV transfer moves blocks by the tokens of the text, but the tokens of these blocks are evicted. Leave out "
            "--kv-transfer-config.",
        ),
        (
            str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32"),
            f"Scores need keys and values, not codes. Leave out --kv-cache-dtype {cache.cache_dtype}.",
        ),
        (
            bool(model.use_mla),
            "Latents (MLA) have one block for keys and values of all heads. Use a model without MLA.",
        ),
        (bool(model.is_encoder_decoder), "Cross attention holds the encoder's tokens. Use a decoder."),
        (model.runner_type != "generate", "Nothing is generated, so nothing is evicted. Use --runner generate."),
        (
            bool(model.is_mm_prefix_lm),
            "Images of this model attend to later tokens, and evicted ones are gone by then. Use another model.",
        ),
        (
            parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "Context parallelism divides a text among processes, and a policy needs all of it. Use "
            "--tensor-parallel-size.",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "Half batches would plan twice. Leave out --enable-dbo."),
        (
            bool(getattr(cache, "kv_sharing_fast_prefill", False)),
            "Layers that share keys read a part of the prompt only. Leave out --kv-sharing-fast-prefill.",
        ),
        (
            bool(scheduler.disable_hybrid_kv_cache_manager) and _slides(model.hf_text_config),
            "Sliding layers would hold all tokens. Leave out --disable-hybrid-kv-cache-manager.",
        ),
    ]


def _slides(text: Any) -> bool:
    return any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ())


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
        setting = config.additional_config.get(NAME) if isinstance(config.additional_config, Mapping) else None
        if setting is not None:
            check_vllm()
            for refused, reason in _refusals(config):
                if refused:
                    raise ValueError(f"{NAME}: {reason}")
        checked = None if setting is None else Settings.check(config.model_config.hf_config, setting)
        _latest = weakref.ref(config), checked
    return _latest[1]


def latest() -> tuple[Any, Settings | None]:
    """The server whose settings were asked for last in this process, and these."""
    return (None, None) if _latest is None else (_latest[0](), _latest[1])
