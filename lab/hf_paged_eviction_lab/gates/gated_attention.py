"""Attention in which gates shut out tokens, with gradients to the gates: the implementation "paged_eviction_gated".

Only training gates uses it: it is plain attention that holds all its weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from hf_paged_eviction.internals import DISTANCE, HARMLESS, using

from .install import hidden_states, hooked

#: For `model.set_attn_implementation`.
GATED_ATTENTION = "paged_eviction_gated"


@dataclass
class GatedLayer:
    """One attention module in the forward that is under way; a forward pre-hook of it.

    Attributes:
        gate: of hidden states `[batch, tokens, hidden]` the logarithms of the odds that a token is let through,
            `[batch, tokens, kv_heads]`; None = all are.
        hidden: the hidden states.
        odds: what the gate said of them, `[batch, kv_heads, tokens]`.
        kv_heads: 0 = its attention was never called.
    """

    gate: Callable[[Tensor], Tensor] | None = None
    hidden: Tensor | None = None
    odds: Tensor | None = None
    kv_heads: int = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.hidden = hidden_states(args, kwargs).detach()
        self.odds = None if self.gate is None else self.gate(self.hidden).mT


_LAYERS: dict[nn.Module, GatedLayer] = {}


@contextmanager
def gated(model: Any, modules: Mapping[int, nn.Module]) -> Iterator[dict[int, GatedLayer]]:
    """Within, these attention modules of the model let their gates shut out tokens."""
    layers = {module: GatedLayer() for module in modules.values()}
    with hooked(layers), using(model, GATED_ATTENTION):
        _LAYERS.update(layers)
        try:
            yield {index: layers[module] for index, module in modules.items()}
        finally:
            for module in layers:
                del _LAYERS[module]


def gated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it. See `queries.attention` for shapes.

    Raises:
        ValueError: the model hands over an argument that would be left out.
    """
    strange = [name for name, argument in kwargs.items() if name not in HARMLESS and argument is not None]
    if strange:
        raise ValueError(f"{type(module).__name__} hands {strange[0]}= to attention, which gates cannot be trained in.")
    layer = _LAYERS.get(module)
    odds = None if layer is None else layer.odds
    if layer is not None:
        layer.kv_heads = key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], -1)).float()  # [batch, kv_heads, group, q, dim]
    logits = grouped @ key.float().mT[:, :, None] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    logits = logits.masked_fill(~_visible(attention_mask, query, key), -torch.inf)
    open_ = None if odds is None else straight_through(odds, query.shape[2])
    weights = shut_softmax(logits, open_, None if s_aux is None else s_aux.float().view(1, key.shape[1], -1, 1, 1))
    output = (weights @ value.float()[:, :, None]).flatten(1, 2)
    return output.transpose(1, 2).contiguous().to(query.dtype), None


def straight_through(odds: Tensor, queries: int) -> Tensor:
    """Whether queries may attend to tokens, `[batch, kv_heads, 1, q, tokens]`: 0 or 1, with the gradient of a sigmoid.

    Args:
        odds: logarithms `[batch, kv_heads, tokens]`.
        queries: how many there are; the last one is of the last token. What is near is attended to in any case.
    """
    hard = yes_or_no(odds)
    places = torch.arange(odds.shape[-1], device=odds.device)
    near = places[-queries:, None] - places < DISTANCE
    return torch.where(near, 1.0, hard[:, :, None, None])


def yes_or_no(odds: Tensor) -> Tensor:
    """1 where the odds are for a token, 0 where they are against it, with the gradient of a sigmoid."""
    soft = odds.sigmoid()
    return (odds > 0).to(soft) + soft - soft.detach()


def shut_softmax(logits: Tensor, open_: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax in which each exponential is multiplied by `open_`.

    A token that is shut out counts, for the gradient of its gate, no more than the largest that is not: it may have
    had all of the attention, and its exponential would be any number.

    Args:
        logits: `[batch, kv_heads, group, q, tokens]`, -inf where nothing is to be seen.
        sinks: logits that belong to no token, broadcastable with one column.
    """
    open_logits = logits if open_ is None else logits.masked_fill(open_ <= 0, -torch.inf)
    top = open_logits.amax(-1, keepdim=True).detach()
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = top.clamp_min(torch.finfo(top.dtype).min)  # a pad sees nothing
    shares = (logits - top).clamp_max(0.0).exp()
    if open_ is not None:
        shares = shares * open_
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return shares / total.clamp_min(torch.finfo(total.dtype).tiny)


def _visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Bool, broadcastable to `[batch, kv_heads, group, q, tokens]`."""
    count, tokens = query.shape[2], key.shape[2]
    if mask is None:
        return torch.ones(count, tokens, dtype=torch.bool, device=query.device).tril(tokens - count)
    mask = mask[..., :tokens]
    return (mask if mask.dtype == torch.bool else mask >= 0)[:, :, None]


AttentionInterface.register(GATED_ATTENTION, gated_attention)
AttentionMaskInterface.register(GATED_ATTENTION, eager_mask)
