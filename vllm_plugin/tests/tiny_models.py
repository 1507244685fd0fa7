"""Tiny models that vLLM builds, with random weights that are large enough for sharp attention."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
FOUR = {"num_hidden_layers": 4, "sliding_window": 64}
MIXED = FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2}
TIED = {"tie_word_embeddings": True}
#: By name: class of the configuration without "Config", and what it has beyond the common numbers.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_of_32k": ("Llama", {"max_position_embeddings": 32768}),
    "llama_of_four": ("Llama", {"num_hidden_layers": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma2": ("Gemma2", MIXED | TIED | {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", MIXED | TIED | {"query_pre_attn_scalar": 32}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "gpt_oss": ("GptOss", MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@cache
def tiny(family: str) -> tuple[Path, Any]:
    """A folder with the model, and the model in transformers."""
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.std() == 0:  # norms and sinks that are all the same show nothing
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    model.save_pretrained(folder)
    if family == "olmo2":
        # vLLM has no class of its own for it. It makes one of transformers' class, whose `forward` it replaces for the
        # whole process; this is what tells the replacement to leave a model alone that vLLM has not made.
        model.model.do_not_compile = True
    return folder, model
