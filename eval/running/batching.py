"""How many rows to run at once, before anything is known but the configuration."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from hf_paged_eviction.internals import PAGED_EVICTION

from ..options.settings import TaskSettings

#: No more rows than this, however small the model; and on a CPU, which is no faster with more of a larger one, so many
#: that rows are soon written.
MOST, MOST_ON_CPU = 64, 8
_SMALL = 20_000_000  # weights
#: Share of the free memory to fill: the allocator, the runtime and other processes want the rest.
SAFE = 0.8


def start_size(settings: TaskSettings, model_config: Any, longest_prompt: int) -> int:
    """Rows per batch without `--batch-size`: a power of two from 1 to 64.

    An estimate, made before the model is loaded. It counts the weights and, per row, the keys and values of the prompt
    twice (one reading that all caches share, and the full cache), its queries if policies may need them, and the
    activations of one layer. If it is too high, the batch is halved when memory runs out; no result depends on it.

    Args:
        settings: device and precision.
        model_config: the model's configuration.
        longest_prompt: tokens of the longest prompt and its answer.
    """
    config = model_config.get_text_config(decoder=True)
    size = bytes_per_number(settings, config)
    free = SAFE * free_bytes(settings) - weight_count(config) * size
    row = row_bytes(config, longest_prompt, size, settings.attn_implementation == "eager")
    if settings.attn_implementation == PAGED_EVICTION and settings.share_prefill:
        row += longest_prompt * size * numbers_per_token(config)[1]
    slow = _on_cpu(settings) and weight_count(config) > _SMALL
    rows = max(1, min(MOST_ON_CPU if slow else MOST, int(free // row)))
    return 1 << (rows.bit_length() - 1)


def bytes_per_number(settings: TaskSettings, config: Any) -> int:
    """Bytes of one weight, key or value."""
    if settings.dtype != "auto":
        return torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    stored = getattr(config, "dtype", None)
    return 4 if _on_cpu(settings) or not isinstance(stored, torch.dtype) else int(stored.itemsize)


def _on_cpu(settings: TaskSettings) -> bool:
    return settings.device_map is None and torch.device(settings.device).type == "cpu"


def numbers_per_token(config: Any) -> tuple[int, int]:
    """Of one token of one row in all layers: keys and values, and queries."""
    heads = _positive(config, "num_attention_heads", 1)
    width = int(config.num_hidden_layers) * _positive(config, "head_dim", max(1, config.hidden_size // heads))
    return 2 * width * _positive(config, "num_key_value_heads", heads), width * heads


def row_bytes(config: Any, tokens: int, size: int, eager: bool = False) -> int:
    """Bytes that a row of so many tokens takes while its prompt is read."""
    hidden, heads = config.hidden_size, _positive(config, "num_attention_heads", 1)
    inner = _positive(config, "intermediate_size", 4 * hidden)
    # Eager attention writes all scores down, once in float32; the others need a mask of one byte per pair.
    pairs = heads * (4 + size) if eager else 1
    return int(tokens * size * (2 * numbers_per_token(config)[0] + 8 * hidden + 2 * inner) + tokens * tokens * pairs)


def weight_count(config: Any) -> int:
    """Roughly how many weights the model has."""
    hidden = config.hidden_size
    inner = _positive(config, "intermediate_size", 4 * hidden)
    experts = max(_positive(config, name, 1) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    if experts > 1:
        inner = _positive(config, "moe_intermediate_size", inner) * experts
    per_layer = hidden * (2 * hidden + 3 * inner) + hidden * numbers_per_token(config)[0] // config.num_hidden_layers
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden
    return int(config.num_hidden_layers * per_layer + embeddings)


def free_bytes(settings: TaskSettings) -> int:
    """Memory that is free on the device, or on all of them for a model that is split."""
    device = torch.device(settings.device)
    split = settings.device_map is not None
    if torch.cuda.is_available() and (split or device.type == "cuda"):
        devices = range(torch.cuda.device_count()) if split else [device]
        return sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    # With what the system keeps of files, which it gives up when it has to.
    return int(psutil.virtual_memory().available)


def _positive(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else otherwise
