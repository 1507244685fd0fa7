"""A full cache with attention that masks, per layer and head, the tokens that another cache did not hold.

Attention is computed by the model's own eager function. Masks reach it through the attention implementation
"paged_eviction_reference", which exists only while `masked` runs; where a model computes attention in code of its own,
hooks put them into the argument `attention_mask` of its attention modules.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from .subject import NotCovered, Subject

REFERENCE = "paged_eviction_reference"


class LayerMasks:
    """The tokens that the queries of each layer see.

    Args:
        visible: by layer, `[rows, kv_heads, columns, columns]` bool.
        cache: a full cache without tokens.
    """

    def __init__(self, visible: dict[int, Tensor], cache: DynamicCache) -> None:
        self.visible, self.cache, self.used = visible, cache, set[int]()
        self._keys: dict[int, Tensor] = {}
        self._newest: int | None = None
        update = cache.update

        def watched(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            states = update(keys, values, layer_idx, *args, **kwargs)
            self._keys[layer_idx], self._newest = states[0], layer_idx
            return states

        cache.__dict__["update"] = watched

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
        """The model's own eager attention, with the mask of the layer of these keys."""
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        queries, columns = query.shape[2], key.shape[2]
        layer, self._newest = self._newest, None
        if layer is not None and self._keys[layer].shape[2] != columns:
            layer = None  # cross-attention, an image encoder
        if layer is None:
            layer = getattr(module, "kv_shared_layer_index", None)
        for index, keys in self._keys.items():  # keys of the newest layer may be recomputed from latents
            if (keys.data_ptr(), keys.shape[2]) == (key.data_ptr(), columns):
                layer = index
        return own(module, query, key, value, self.narrow(layer, mask, queries, columns, query.shape[1], key), **how)

    def narrow(
        self, layer: int | None, mask: Tensor | None, queries: int, columns: int, heads: int | None, like: Tensor
    ) -> Tensor | None:
        """Hide the tokens that this layer must not see in a mask of the model, `[rows, 1 or heads, queries, columns]`.

        Args:
            heads: number of query heads; None = not known, and then all KV heads of the layer must see the same tokens.
            like: keys or hidden states, with the device and dtype for a new mask.
        """
        if layer is None or layer not in self.visible:
            return mask
        self.used.add(layer)
        visible = self.visible[layer][:, :, columns - queries : columns, :columns].to(like.device)
        if (visible == visible[:, :1]).all():
            visible = visible[:, :1]
        elif heads is None:
            raise NotCovered("the model computes attention in its own code, which does not say how many heads it has")
        else:
            cached = self._keys.get(layer, like)
            if like.ndim == 4 and like.shape[1] != cached.shape[1]:
                # JetMoE repeats all heads as a whole, where others repeat each head.
                same = (like[:, :, None, -1] == cached[:, None, :, -1]).all(dim=(0, -1))  # [heads, cached heads]
                visible = visible[:, same.int().argmax(-1).to(visible.device)] if same.any(-1).all() else visible
            visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)
        if mask is not None and mask.dtype == torch.bool:
            return mask[..., :columns] & visible
        dtype = like.dtype if mask is None else mask.dtype
        # The smallest number rather than -inf: a pad may see nothing, and its softmax must stay a number.
        added = torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)
        return added if mask is None else torch.minimum(mask[..., :columns], added)


@contextmanager
def registered(subject: Subject, masks: LayerMasks) -> Iterator[None]:
    """Context manager: the model's attention calls `masks`.

    Raises:
        NotCovered: at the end, if a layer did not call it.
    """
    AttentionInterface.register(REFERENCE, masks.attend)
    AttentionMaskInterface.register(REFERENCE, eager_mask)
    try:
        subject.use(REFERENCE)
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(REFERENCE, None)
    if missing := sorted(masks.visible.keys() - masks.used):
        raise NotCovered(f"the attention of layers {missing} does not go through the attention interface")


@contextmanager
def hooked(subject: Subject, masks: LayerMasks) -> Iterator[None]:
    """Context manager: hooks pass masks to the attention modules.

    Raises:
        NotCovered: some layer has no attention module that takes a mask.
    """

    def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        states = next(argument for argument in bound.arguments.values() if isinstance(argument, Tensor))
        queries, mask = states.shape[1], bound.arguments.get("attention_mask")
        columns = masks.cache.get_seq_length(module.layer_idx) + queries
        counts = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_head"))
        heads = next((count for count in counts if isinstance(count, int)), None)
        bound.arguments["attention_mask"] = masks.narrow(module.layer_idx, mask, queries, columns, heads, states)
        return bound.args, bound.kwargs

    modules = [
        module
        for name, module in subject.model.named_modules()
        if getattr(module, "layer_idx", None) in masks.visible
        and "attention_mask" in inspect.signature(module.forward).parameters
        and "attn" in (type(module).__name__ + name).lower().replace("attention", "attn")
        and not any(word in name for word in ("cross", "encoder_attn"))
    ]
    if missing := sorted(masks.visible.keys() - {module.layer_idx for module in modules}):
        raise NotCovered(
            f"the model computes attention in its own code, and layers {missing} have no attention module that takes a "
            "mask"
        )
    handles = [module.register_forward_pre_hook(narrow, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
