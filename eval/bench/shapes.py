"""Models made on the spot: published shapes with random weights, since time does not depend on them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..errors import UserError
from ..models.device import is_out_of_memory
from ..models.loading import load_model
from ..options.model import Loading
from ..options.settings import EMBEDDED, Settings

_NAMES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings"
).split()


def shape(*sizes: int, **more: Any) -> dict[str, Any]:
    """What `LlamaConfig` takes: vocabulary, hidden and inner size, layers, heads, KV heads, positions; and `more`."""
    return {**dict(zip(_NAMES, sizes, strict=True)), **more}


_LLAMA_3: dict[str, Any] = {"rope_theta": 500000.0}
#: Sizes as in the configurations that were published with the models.
SHAPES: dict[str, dict[str, Any]] = {
    # About 100 M parameters with grouped-query attention: small enough for a CPU.
    "100m": shape(8192, 768, 3072, 10, 12, 4, 65536),
    # Two layers: prompts of 64k tokens are read with a full cache in a minute or two.
    "prefill": shape(8192, 512, 1536, 2, 8, 2, 131072),
    "smollm2-135m": shape(49152, 576, 1536, 30, 9, 3, 8192, rope_theta=100000.0, tie_word_embeddings=True),
    "llama-3.2-1b": shape(128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, tie_word_embeddings=True, **_LLAMA_3),
    "llama-3.2-3b": shape(128256, 3072, 8192, 28, 24, 8, 131072, head_dim=128, tie_word_embeddings=True, **_LLAMA_3),
    "llama-3.1-8b": shape(128256, 4096, 14336, 32, 32, 8, 131072, head_dim=128, tie_word_embeddings=False, **_LLAMA_3),
}
#: Models that run on the CPU unless a device is named.
FOR_A_CPU = (EMBEDDED, "100m", "prefill", "smollm2-135m")


def config_of(name: str) -> LlamaConfig:
    """The configuration of a shape."""
    return LlamaConfig(**SHAPES[name])


def make_model(options: Loading) -> Any:
    """A model in evaluation mode: a shape with random weights, made on its device, or one that is loaded.

    "auto" is float32 on a CPU; elsewhere bfloat16 for a shape and the checkpoint's own for others.

    Raises:
        UserError: there is no such model, or it does not fit.
    """
    name, dtype, device = options.model, options.dtype, options.device or "cpu"
    if name not in SHAPES:
        return load_model(Settings(**{**options.common(Loading), "policies": (), "budgets": ()}))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype_of(dtype, device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"the model {name} does not fit on {device}: --dtype bfloat16 halves it") from error
    return model.eval()


def dtype_of(name: str, device: str, checkpoint: Any = None) -> torch.dtype:
    """What "auto" means: float32 on a CPU; elsewhere bfloat16 for a shape and what the configuration of a checkpoint
    says."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device == "cpu":
        return torch.float32
    return getattr(checkpoint, "dtype", None) or torch.bfloat16
