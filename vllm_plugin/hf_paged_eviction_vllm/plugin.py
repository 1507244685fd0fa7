"""What vLLM calls in each of its processes, before it reads its configuration."""

import logging

logger = logging.getLogger("vllm.paged_eviction")

#: Backends of vLLM, and ours in their place.
BACKENDS = {
    "CPU_ATTN": "cpu.CpuBackend",
    "FLASH_ATTN": "gpu.FlashBackend",
    "TRITON_ATTN": "gpu.TritonBackend",
}


def register() -> None:
    """Make eviction known to vLLM. Nothing changes unless a server has the setting `paged_eviction`."""
    from .contract import moved

    missing = moved()
    if missing:  # a server without the setting must start all the same; with it, `settings_of` refuses
        logger.debug("paged_eviction is not available: %s", "; ".join(missing))
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import metrics, spec

    metrics.make_file()
    spec.register()
    for name, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], f"{__package__}.{path}")
