"""What the values should be: one equation per query of the probe, built from a plain model and solved as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plain_queries(model: Any, text: Tensor, start: int) -> list[Tensor]:
    """Per layer `[query heads, queries, dim]` after rotation, of the tokens of one row from `start` on: a Llama's."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    found: list[Tensor] = []
    hooks = [
        block.self_attn.register_forward_hook(
            lambda module, args, kwargs, _: found.append(_rotated(module, kwargs, apply_rotary_pos_emb)[:, start:]),
            with_kwargs=True,
        )
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(text[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _rotated(module: Any, kwargs: dict[str, Any], apply: Any) -> Tensor:
    states = kwargs["hidden_states"]
    shape = (*states.shape[:2], -1, module.head_dim)
    query, key = (layer(states).view(shape).transpose(1, 2) for layer in (module.q_proj, module.k_proj))
    return apply(query, key, *kwargs["position_embeddings"])[0][0]


def slow_values(
    keys: Tensor, values: Tensor, kept: list[int], queries: list[Tensor], scaling: float, ridge: float
) -> Tensor:
    """`[t, dim]` float64, of one head.

    Args:
        keys, values: `[tokens, dim]`.
        queries: `[dim]` each.
    """
    keys, values = keys.double(), values.double()
    rows, wanted = [], []
    for query in queries:
        logits = torch.stack([query.double() @ key for key in keys]) * scaling
        rows.append(logits[kept].softmax(0))
        wanted.append(logits.softmax(0) @ values)
    for at, token in enumerate(kept):  # the ridge: a query that asks for this token alone and wants it as it was
        rows.append(torch.eye(len(kept), dtype=torch.float64)[at] * ridge**0.5)
        wanted.append(values[token] * ridge**0.5)
    return torch.linalg.lstsq(torch.stack(rows), torch.stack(wanted)).solution
