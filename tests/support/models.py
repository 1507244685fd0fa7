"""Tiny random models, one per architecture family.

Weights are drawn wide, so that logits differ by whole units when attention sees the wrong tokens: with the
usual initialisation of 0.02 every cache would pass.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

VOCABULARY = 120
PAD = 0
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# The default of gpt_oss stretches its positions to 131,072.
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_sliding": ("mistral", {"sliding_window": 12}),
    "gemma2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING_AND_FULL}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING_AND_FULL}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4, "rotary_pct": 0.5}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_PLAIN_ROPE, **_SLIDING_AND_FULL},
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 0],
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "resid_pdrop": 0,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "conv_L_cache": 3}),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
HYBRID = ("lfm2", "qwen3_next")
#: Soft-capping or sinks: sdpa cannot express them (gemma2 refuses it in newer versions).
EAGER_ONLY = ("gemma2", "gpt_oss")
FAMILIES = tuple(_FAMILIES)

_FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
#: Layers take their keys and values from an earlier one of their type.
SHARED = ("gemma3n", "gemma4")
#: Layers hold a linear state next to keys and values.
LINEAR_AND_FULL = ("falcon_h1", "zamba", "zamba2", "zaya")
_FAMILIES |= {
    "gemma3n": ("gemma3n_text", {"head_dim": 8, "laurel_rank": 4, "altup_num_inputs": 2, **_FOUR_LAYERS}),
    "gemma4": ("gemma4_text", {"head_dim": 8, "global_head_dim": 16, **_FOUR_LAYERS}),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16, "head_dim": 8, **_MAMBA},
    ),
    "zamba": (
        "zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_head_dim": 16,
            "attention_hidden_size": 64,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            **_MAMBA,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "chunk_size": 16,
            "use_mem_rope": True,
            "use_mamba_kernels": False,
            **_MAMBA,
        },
    ),
    # Neighbouring channels turn together; so do half of the channels; one layer of two does not turn.
    "cohere": ("cohere", {}),
    "glm": ("glm", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "diffllama": ("diffllama", {"head_dim": 8}),
    "hrm_text": ("hrm_text", {"head_dim": 8, "num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 1}),
    "zaya": ("zaya", {"head_dim": 16, "num_experts": 2, "moe_intermediate_size": 16, "router_hidden_size": 16}),
}


def rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    """Rotary parameters of this type."""
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": rope_type, **settings}}


def smollm2_config() -> LlamaConfig:
    """The shapes of SmolLM2-135M-Instruct, which what comes with the package was fitted to."""
    return LlamaConfig(
        num_hidden_layers=30,
        hidden_size=576,
        vocab_size=49152,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )


def family_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of this family."""
    model_type, settings = _FAMILIES[family]
    return AutoConfig.for_model(model_type, **{**_COMMON, **settings, **changes})


def unavailable(family: str) -> str | None:
    """Why this family cannot be tested on the installed transformers, or None."""
    if _FAMILIES[family][0] not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no {family}"
    return None


def cannot_crop(family: str, mode: str) -> str | None:
    """Why transformers cannot run a speculative mode on this family, whatever the cache; None if it can."""
    if mode not in ("prompt_lookup", "assisted"):
        return None
    if family == "qwen3_next" or (family in HYBRID and VERSION < (5, 20)):
        return "generate refuses assisted decoding for models that declare themselves stateful"
    if VERSION < (5, 15) and family in ("gemma2", "gemma3", "gpt_oss", "llama4", "mistral_sliding"):
        return f"sliding layers of transformers {transformers.__version__} refuse to crop"
    return None


def recurrence_differs(family: str, mode: str, padded: bool) -> str | None:
    """Why no cache at all, DynamicCache included, gives what one long forward gives; None if it does."""
    if family in HYBRID and VERSION < (5, 20) and (padded or mode != "greedy"):
        return f"recurrent layers of transformers {transformers.__version__} depend on chunks and pads"
    return None


def randomise(model: PreTrainedModel, seed: int, scale: float = 0.25) -> PreTrainedModel:
    """Draw all matrices anew, wide and the same on every version of transformers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            # One-dimensional parameters (norms, decay rates) keep what the architecture needs to stay stable.
            if parameter.dim() > 1:
                wide = 1.0 if "embed_tokens" in name or "embed_in" in name else scale
                parameter.normal_(0.0, wide, generator=generator)
    return model.eval()


def build(family: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model of this family; the same weights for the same seed."""
    config = family_config(family, **changes)
    attention = "eager" if family in EAGER_ONLY and attention == "sdpa" else attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for the vectors that `randomise` leaves as they are: attention sinks, for one
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return randomise(model, seed)


@cache
def shared(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """As `build`, built once per process: callers must leave it as it is."""
    model = build(family, attention, seed)
    _eager_twins[model] = None
    return model


#: Of the models that `shared` hands out; None until one is asked for.
_eager_twins: WeakKeyDictionary[PreTrainedModel, PreTrainedModel | None] = WeakKeyDictionary()


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes attention in the open; that of a shared model is made once."""
    twin = _eager_twins.get(model)
    if twin is None:
        twin = copy.deepcopy(model)
        twin.set_attn_implementation("eager")
        if model in _eager_twins:
            _eager_twins[model] = twin
    return twin


def paged(config: Any, *sizes: Any, record_past: bool = False, **settings: Any) -> PagedEvictionCache:
    """A cache, perhaps one that holds new tokens back until they are sure to stay."""
    cache = PagedEvictionCache(config, *sizes, **settings)
    if record_past:
        cache.activate_past_recording()
    return cache


@cache
def caches_latents() -> bool:
    """Whether this transformers release caches the latents of MLA; earlier ones expand them before."""
    past = transformers.DynamicCache(config=family_config("deepseek_v3"))
    with torch.no_grad():
        shared("deepseek_v3")(torch.ones(1, 2, dtype=torch.long), **{CACHE_ARGUMENT: past})
    return bool(past.layers[0].keys.shape[1] == 1)


def prompts(lengths: list[int], seed: int = 0, draw: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Token ids [length] per row, without the pad id."""
    generator = torch.Generator().manual_seed(seed)
    draw = draw or (lambda n: torch.randint(2, VOCABULARY, (n,), generator=generator))
    return [draw(length) for length in lengths]


def need_masks_of_single_tokens(model: PreTrainedModel) -> None:
    """Skip a test that hides single tokens where their mask is not read."""
    if model.device.type != "cpu":
        pytest.skip("an accelerator would have to wait for the mask of each single token")


def left_pad(rows: list[torch.Tensor], width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, width] with the pads on the left."""
    width = width or max(len(row) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Position ids as generate computes them: the pads do not count."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
