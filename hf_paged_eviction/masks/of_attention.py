"""The masks of attention calls: which were made for the cache, what a layer puts in their place, and their forms.

A mask that transformers makes for "paged_eviction" bears a mark (`marked_mask`). One without a mark was made by
somebody else, and is used as it is or refused.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from .channel import is_plain_causal


class MaskOwner(Protocol):
    """The layer whose keys are compared with queries, see `KeyOwner`."""

    @property
    def held(self) -> int: ...

    @property
    def all_real(self) -> bool: ...

    def mask(self, query_length: int) -> Tensor | None: ...


def marked_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What sdpa gets, marked: a mask without a mark was made by somebody else and is left as it is."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None:
        if 1 in mask.shape[2:]:  # of one token, or one that layers with masks of their own do not use
            mask = mask.contiguous()  # else generate() does so where a cache can be compiled, and loses the mark
        mark = "of_paged_eviction" if is_plain_causal(kwargs) else "of_other_tokens"
        setattr(mask, mark, True)
    return mask


def is_ours(mask: Tensor | None) -> bool:
    return mask is None or getattr(mask, "of_paged_eviction", False)


def fitting(mask: Tensor | None, owner: MaskOwner | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The model's mask, or none where none is needed."""
    if mask is None:
        return None
    if mask.shape[-1] < key.shape[2]:
        raise ValueError(
            f"The attention mask is {mask.shape[-1]} tokens wide and the keys are {key.shape[2]}. If layers of this "
            "model share keys and lie on several devices, use allocator='uniform' and one number as budget."
        )
    # In this order: compiled code would be bound to where the mask came from even where that does not matter.
    return None if query.shape[2] == 1 and owner is not None and owner.all_real and is_ours(mask) else mask


def own_mask(mask: Tensor | None, owner: MaskOwner, count: int) -> Tensor | None:
    """The mask of a layer that holds another number of tokens than the others."""
    # In this order: compiled code would otherwise be bound to how many tokens are held.
    if getattr(mask, "of_other_tokens", False) and not owner.held:
        return mask  # nothing was held before: the model's mask fits, and it may see more than causality
    check_own_mask(mask)
    return owner.mask(count)


def check_own_mask(mask: Tensor | None) -> None:
    if not is_ours(mask):
        raise ValueError(
            "This model or call brings an attention mask of its own making (tokens of an image that see each other, in "
            "a forward after the first, are such), but the layers of this cache hold different numbers of tokens, so "
            "no mask fits them all. Use allocator='uniform' and one number as budget, give all images with the first "
            "prompt, or, if the mask is yours, pass the 2-D attention_mask instead."
        )


def per_query_head(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """For each query head its own, where KV heads differ."""
    if mask is None or mask.shape[1] in (1, query.shape[1]):
        return mask
    return mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)


def is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    chosen = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if chosen is None else chosen)


def last_rows(query: Tensor, key: Tensor) -> Tensor:
    """The mask of the last queries of a prompt, `[1, 1, q, tokens]`: some models drop the others (gemma4)."""
    count, tokens = query.shape[2], key.shape[2]
    return torch.ones(count, tokens, dtype=torch.bool, device=query.device).tril(tokens - count)[None, None]


def as_bias(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The mask as it is added to the logits of a `Part`."""
    if mask is None:
        return None
    if mask.shape[1] != 1:
        raise ValueError("A disposal that is attended to beside the cache needs one mask for all heads.")
    mask = mask[..., : key.shape[2]]
    return torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask.float()


def additive(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """The mask as eager attention wants it: added to the logits."""
    if mask is None:
        if query.shape[2] == 1 or not causal:
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


def biased(mask: Tensor | None, bias: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """The mask with `bias` `[batch, kv_heads, 1, tokens]` added: `[batch, query_heads, 1 or q, tokens]`."""
    bias = bias.to(query.dtype).repeat_interleave(query.shape[1] // bias.shape[1], 1)
    mask = additive(mask, query, key, causal)
    return bias if mask is None else mask[..., : key.shape[2]] + bias
