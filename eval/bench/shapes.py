"""Models made on the spot: published shapes with random weights, since time does not depend on them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..environment import best_device
from ..errors import UserError
from ..models import load
from ..options.model import Loading
from ..settings import EMBEDDED, Settings

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}

#: Sizes as in the configurations that were published with the models.
SHAPES: dict[str, dict[str, Any]] = {
    # About 100 M parameters with grouped-query attention: small enough for a CPU.
    "100m": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
    },
    # Two layers: prompts of 64k tokens are read with a full cache in a minute or two.
    "prefill": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        **_LLAMA_3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def config_of(name: str) -> LlamaConfig:
    """The configuration of a shape."""
    return LlamaConfig(**SHAPES[name])


def make_model(options: Loading) -> Any:
    """A model in evaluation mode: a shape, made where it runs and never on the way there, or one that is loaded.

    "auto" is float32 on a CPU; elsewhere bfloat16 for a shape and the checkpoint's own for others.

    Raises:
        UserError: there is no such model, or it does not fit.
    """
    name, dtype, device = options.model, options.dtype, options.device or "cpu"
    if name not in SHAPES:
        policy = getattr(options, "policy", None)  # one with gates has them installed
        policies = () if policy is None else (policy,)
        return load(Settings(**{**options.common(Settings), "policies": policies, "budgets": ()}))[0]
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype_of(dtype, device))
    except (torch.OutOfMemoryError, MemoryError) as error:
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


def choose_device(wanted: str | None, model: str) -> str:
    """The device asked for, or the accelerator; the CPU for the models that are made for it.

    Raises:
        UserError: it is not there.
    """
    if wanted is None:
        return "cpu" if model in (EMBEDDED, "100m") else best_device()
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"--device {wanted}: write cpu, cuda or cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {wanted}: this machine has {torch.cuda.device_count()} CUDA devices in sight")
    return wanted
