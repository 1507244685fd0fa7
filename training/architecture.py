"""The untrained embedded model."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# A high base keeps half of the dimensions nearly unrotated over 4,096 tokens: those match content.
_THETA = 500000.0
_FAST, _POINTER = 3, 5.0  # how many rotary frequencies point at the tokens just before, and how sharply


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 1.2 million parameters with grouped-query attention, a function of the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: LlamaForCausalLM) -> None:
    """Weights wider than the default, which suits wider models, and a first layer that looks 1, 2, 3 and 4 tokens back.

    Recall needs heads that see the tokens before a token (Olsson et al. 2022, arXiv 2209.11895); to find them by chance
    costs thousands of steps. A bias in q and k over the fastest rotary frequencies, with q turned back by `offset`,
    scores highest `offset` tokens ago. This is a start, not a constraint: all of it is trained.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0.0, 0.1 if "embed_tokens" in name else 0.06)
    attention, half = model.model.layers[0].self_attn, model.config.head_dim // 2
    key = attention.k_proj.bias.view(-1, 2, half)
    query = attention.q_proj.bias.view(-1, 2, half)
    base = model.config.rope_parameters["rope_theta"]
    turn = torch.outer(torch.arange(1.0, len(query) + 1), base ** (-torch.arange(_FAST) / half))
    key[:, 0, :_FAST] = _POINTER
    query[:, 0, :_FAST], query[:, 1, :_FAST] = _POINTER * turn.cos(), -_POINTER * turn.sin()
