"""The setting `paged_eviction` of a server, checked against its model and against what else vLLM was asked to do."""

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from hf_paged_eviction.internals import BlockBudget, Setup, Uniform, reads_profile, register_checkpoint

from .contract import check_vllm, without_snapshots
from .pages import FP8

logger = logging.getLogger("vllm.paged_eviction")

NAME = "paged_eviction"


class Settings(Setup):
    """What every request gets.

    Attributes:
        reserve: whether a request is admitted only if the blocks of its budget are free, so that none is preempted.
        part: see `EvictionSpec`; None = not known yet.
        profile: the file with its profile; None = nothing reads one.
        no_snapshots: why what a request holds when it ends is not kept for those that begin like it; None = it is.

    Args:
        config: the model's configuration (transformers).
        setting: options of a cache, `reserve` and `snapshots`.

    Raises:
        TypeError, ValueError: it is not valid or cannot be served; the message says what would be.
    """

    server = "vLLM"
    unserved = {  # noqa: RUF012  (of the class)
        "bits": "its blocks hold keys and values in one type. Start it with --kv-cache-dtype fp8 for 8 bits",
        "disposal": "evicted tokens are overwritten",
        "static": "it captures its own graphs",
        "protect": "spans belong to one text. Give each request its own, "
        "extra_args={'paged_eviction_protect': [[0, 64]]}",
    }

    def __init__(self, config: Any, setting: Mapping[str, Any]) -> None:
        if not isinstance(setting, Mapping):
            raise TypeError(f'{NAME} is a table of settings such as {{"budget": 1024}}, got {setting!r}.')
        options = dict(setting)
        flags = {name: options.pop(name, True) for name in ("reserve", "snapshots")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{NAME}.{name} is true or false, got {flag!r}.")
        self.reserve = flags["reserve"]
        self.part: float | None = None
        super().__init__(config, options)
        self.profile = next(iter({**self.policy.profile_digests, **self.allocator.profile_digests}), None)
        self.no_snapshots = self._no_snapshots(flags["snapshots"])
        if options.get("policy", "auto") == "auto" and self.profile is None:
            logger.warning(
                "No policy is named, and no profile of these weights is found, so %s evicts. A profile of "
                "`paged-eviction prepare` keeps more answers: "
                '{"profile": "FILE", "policy": "calibrated", "allocator": "heads"}.',
                self.policy.label,
            )

    @property
    def unequal(self) -> bool:
        """Whether layers or heads hold different numbers of tokens."""
        return not isinstance(self.allocator, Uniform)

    def _no_snapshots(self, wanted: bool) -> str | None:
        if not wanted:
            return 'the setting says "snapshots": false'
        if self.policy.needs.queries:
            return f"{self.policy.label} watches queries, and what it saw cannot be taken back: prompts are read anew"
        missing = without_snapshots()
        return None if missing is None else f"in the installed vLLM {missing}"

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
        f"Keys and values are kept as the model computes them ({model.dtype}), or in 8 bits with one scale per layer. "
        f"Leave out --kv-cache-dtype {cache.cache_dtype}, or use --kv-cache-dtype fp8.": (
            str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch."), *FP8)
        ),
        "Layers that evict share blocks, so all store one type. Leave out --kv-cache-dtype-skip-layers.": bool(
            cache.kv_cache_dtype_skip_layers
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


_servers: dict[int, tuple["weakref.ref[Any]", Settings | None]] = {}  # by identity, the last one last


def settings_of(config: Any) -> Settings | None:
    """The settings of a server, checked once; None if it does not evict.

    Args:
        config: its `VllmConfig`.

    Raises:
        TypeError, ValueError: something cannot be served; the message says what to do.
    """
    server = _servers.pop(id(config), None)
    if server is None or server[0]() is not config:
        additional = config.additional_config
        setting = additional.get(NAME) if isinstance(additional, Mapping) else None
        server = weakref.ref(config), None if setting is None else _checked(config, setting)
    _servers[id(config)] = server
    return server[1]


def _checked(config: Any, setting: Any) -> Settings:
    check_vllm()
    for reason, refused in _refusals(config).items():
        if refused:
            raise ValueError(f"{NAME}: {reason}")
    _register_weights(config, setting)
    settings = Settings(config.model_config.hf_config, setting)
    if config.parallel_config.tensor_parallel_size > 1 and not settings.separate:
        raise ValueError(
            f'{NAME}: with heads="shared" the mean over all KV heads decides, and tensor parallelism divides them over '
            'processes. Use {"heads": "separate"}.'
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        if settings.unequal:
            raise ValueError(
                f"{NAME}: layers with budgets of their own share blocks, and pipeline parallelism divides them over "
                'processes. Use {"allocator": "uniform"}, or --tensor-parallel-size.'
            )
        settings.no_snapshots = settings.no_snapshots or "pipeline parallelism divides the layers over processes"
    if not config.cache_config.enable_prefix_caching:
        settings.no_snapshots = "--no-enable-prefix-caching"
    if len(settings.layers) != config.model_config.get_total_num_hidden_layers():
        settings.no_snapshots = settings.no_snapshots or "layers that slide are vLLM's own: prompts are read anew"
    return settings


def _register_weights(config: Any, setting: Any) -> None:
    """Let the profile of a checkpoint on this machine be found, if one is needed and none is named."""
    model, options = config.model_config, setting if isinstance(setting, Mapping) else {}
    wanted = options.get("profile") is None and reads_profile(options.get("policy", "auto"), options.get("allocator"))
    if not wanted or config.load_config.load_format == "dummy":
        return
    folder = Path(model.model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        except (OSError, ValueError):  # not on this machine yet
            return
    register_checkpoint(model.hf_config, folder)


def latest() -> tuple[Any, Settings | None]:
    """The server whose settings were asked for last in this process, and these."""
    if not _servers:
        return None, None
    config, settings = next(reversed(_servers.values()))
    return config(), settings


def live() -> list[Settings]:
    """The settings of all servers in this process that evict."""
    servers = [(key, config(), settings) for key, (config, settings) in _servers.items()]
    for key, config, _ in servers:
        if config is None:
            del _servers[key]
    return [settings for _, config, settings in servers if config is not None and settings is not None]
