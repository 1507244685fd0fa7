"""The masks of attention calls: which were made for the cache, what a layer puts in their place, and their forms.

A mask that transformers makes for "paged_eviction" bears a mark (`marked_mask`). One without a mark was made by
somebody else, and is used as it is or refused.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from .channel import is_plain_causal


class MaskOwner(Protocol):
    """The layer whose keys are compared with queries. By default the model's mask is used.

    Attributes:
        masks_itself: the model's own mask does not fit these keys, so `mask` is used.
    """

    masks_itself: bool

    @property
    def held(self) -> int:
        """Number of tokens held before this forward, or after it."""
        return 0

    @property
    def all_real(self) -> bool:
        """Whether a single query sees all keys, so that it needs no mask."""
        return False

    @property
    def all_new(self) -> bool:
        """Whether all keys belong to this forward and none to a pad, so that a causal mask is right."""
        return False

    def mask(self, query_length: int) -> Tensor | None:
        """`[batch, 1 or kv_heads, query_length, tokens]` bool; None = every query sees all keys."""
        return None


def marked_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What sdpa gets, marked: a mask without a mark was made by somebody else and is left as it is."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None:
        if 1 in mask.shape[2:]:  # of one token, or one that layers with masks of their own do not use
            mask = mask.contiguous()  # else generate() does so where a cache can be compiled, and loses the mark
        mark = "of_paged_eviction" if is_plain_causal(kwargs) else "of_other_tokens"
        setattr(mask, mark, True)
    return mask


def _is_ours(mask: Tensor | None) -> bool:
    return mask is None or getattr(mask, "of_paged_eviction", False)


@dataclass(frozen=True)
class _OwnMask:
    """The mask of keys that a layer handed out; noted on them, since other layers may attend to them again.

    Attributes:
        mask: `[batch, 1 or kv_heads, q, tokens]`; None = every query sees all keys, or the reader of the keys knows.
    """

    mask: Tensor | None


def mask_of_call(
    mask: Tensor | None, owner: MaskOwner | None, query: Tensor, key: Tensor, causal: bool
) -> tuple[Tensor | None, bool]:
    """The mask of an attention call, and whether it is the layer's own: then None = every query sees all keys.

    Args:
        mask: the model's.
        owner: the layer of the keys; None where another layer attends to them, too.
        key: `[batch, kv_heads, tokens, dim]`; without tokens if it carries a reader.
        causal: whether None is a causal mask.

    Raises:
        ValueError: the mask fits no layer, or not these keys.
    """
    count, tokens = query.shape[2], key.shape[2]
    if owner is not None and owner.masks_itself and not (mask is None and owner.all_new):
        key.own_mask = _OwnMask(_own_mask(mask, owner, count) if tokens else None)  # type: ignore[attr-defined]
    noted: _OwnMask | None = getattr(key, "own_mask", None)
    if noted is not None:
        if not tokens:
            check_own_mask(mask)
        return None if noted.mask is None else noted.mask[:, :, -count:], True
    if mask is None:
        # Some models drop all queries of a prompt but the last ones (gemma4).
        return _causal_rows(query, key) if 1 < count < tokens and causal else None, False
    if mask.shape[-1] < tokens:
        raise ValueError(
            f"The attention mask is {mask.shape[-1]} tokens wide and the keys are {tokens}. If layers of this "
            "model share keys and lie on several devices, use allocator='uniform' and one number as budget."
        )
    # In this order: compiled code would be bound to where the mask came from even where that does not matter.
    return None if count == 1 and owner is not None and owner.all_real and _is_ours(mask) else mask, False


def _own_mask(mask: Tensor | None, owner: MaskOwner, count: int) -> Tensor | None:
    """The mask of a layer that holds another number of tokens than the others."""
    # In this order: compiled code would otherwise be bound to how many tokens are held.
    if getattr(mask, "of_other_tokens", False) and not owner.held:
        return mask  # nothing was held before: the model's mask fits, and it may see more than causality
    check_own_mask(mask)
    return owner.mask(count)


def check_own_mask(mask: Tensor | None) -> None:
    if mask is not None and not getattr(mask, "of_paged_eviction", False):
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


def _causal_rows(query: Tensor, key: Tensor) -> Tensor:
    """The rows of a causal mask for the last tokens, `[1, 1, q, tokens]`."""
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
        mask = _causal_rows(query, key)
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


def biased(mask: Tensor | None, bias: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """The mask with `bias` `[batch, kv_heads, 1, tokens]` added: `[batch, query_heads, 1 or q, tokens]`."""
    bias = bias.to(query.dtype).repeat_interleave(query.shape[1] // bias.shape[1], 1)
    mask = additive(mask, query, key, causal)
    return bias if mask is None else mask[..., : key.shape[2]] + bias
