"""A plain full cache under attention that leaves out, per layer and head, what another cache did not hold.

Attention is computed by the model's own eager function. Masks reach it through the attention implementation
"paged_eviction_reference", which exists only while a reference runs; where a model computes attention in code of its
own, hooks put them into the argument `attention_mask` of its attention modules.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from .model_state import NotCovered, use_attention

REFERENCE = "paged_eviction_reference"


class LayerMasks:
    """What the queries of each layer may attend to.

    Attributes:
        used: layers that have asked.

    Args:
        visible: by layer, `[rows, kv_heads, columns, columns]` bool.
        cache: full, empty; its layers are watched from now on.
    """

    def __init__(self, visible: dict[int, Tensor], cache: DynamicCache) -> None:
        self._visible = visible
        self._keys: dict[int, Tensor] = {}
        self._newest: int | None = None
        self.used: set[int] = set()
        update = cache.update

        def watched(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            returned = update(keys, values, layer_idx, *args, **kwargs)
            self._keys[layer_idx], self._newest = returned[0], layer_idx
            return returned

        cache.__dict__["update"] = watched

    def layer_of(self, module: Any, key: Tensor) -> int | None:
        """Whose keys these are; None for those of no layer that is masked (cross-attention, an image encoder)."""
        newest, self._newest = self._newest, None
        for index, keys in self._keys.items():  # also found by a layer that shares the keys of another
            if keys.data_ptr() == key.data_ptr() and keys.shape[-2] == key.shape[-2]:
                return index
        if newest is not None and self._keys[newest].shape[-2] == key.shape[-2]:
            return newest  # keys made anew from what is cached: latent attention
        shared: int | None = getattr(module, "kv_shared_layer_index", None)
        return shared

    def narrow(
        self,
        layer: int | None,
        mask: Tensor | None,
        queries: int,
        columns: int,
        heads: int | None,
        like: Tensor,
        key: Tensor | None = None,
    ) -> Tensor | None:
        """The mask of a model, `[rows, 1 or heads, queries, columns]`, with what this layer must not see taken out.

        Args:
            heads: query heads; None where they are not known, then all KV heads of the layer must see the same.
            like: says the device, and the dtype of a mask that is made anew.
            key: as attention gets them, where that is known: some models have put their heads in an order of their own.
        """
        if layer is None or layer not in self._visible:
            return mask
        self.used.add(layer)
        visible = self._visible[layer][:, :, columns - queries : columns, :columns].to(like.device)
        if (visible == visible[:, :1]).all():
            visible = visible[:, :1]
        elif heads is None:
            raise NotCovered("the model computes attention in its own code, which does not say how many heads it has")
        else:
            visible = self._in_order_of(layer, visible, key)
            visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)
        if mask is None:
            return _additive(visible, like.dtype)
        mask = mask[..., :columns]
        if mask.dtype == torch.bool:
            return mask & visible
        return torch.minimum(mask, _additive(visible, mask.dtype))

    def _in_order_of(self, layer: int, visible: Tensor, key: Tensor | None) -> Tensor:
        """For the heads of `key`: JetMoE repeats all heads as a whole, where others repeat each head."""
        cached = self._keys.get(layer)
        if key is None or cached is None or key.shape[1] == cached.shape[1]:
            return visible
        same = (key[:, :, None, -1] == cached[:, None, :, -1]).all(dim=(0, -1))  # [heads, cached heads]
        return visible[:, same.int().argmax(-1).to(visible.device)] if same.any(-1).all() else visible


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    # The smallest number rather than -inf: a pad may see nothing, and its softmax must stay a number.
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)


class Reference:
    """Runs a model with masks of its own per layer and head.

    Args:
        model: any; its attention implementation is changed while a run is on.
        layers: those that will be masked.

    Raises:
        NotCovered: (by `masked`) no way was found to hand masks to all of these layers.
    """

    def __init__(self, model: Any, layers: list[int]) -> None:
        self._model, self._layers = model, layers
        self._through_hooks = False

    def run(self, visible: dict[int, Tensor], cache: DynamicCache, feed: Callable[[], Tensor]) -> Tensor:
        """What `feed` returns while `cache`, which it fills, is masked."""
        masks = LayerMasks(visible, cache)
        if self._through_hooks:
            with self._hooks(masks, cache):
                return feed()
        with _registered(masks):
            use_attention(self._model, REFERENCE)
            logits = feed()
        missing = [layer for layer in self._layers if layer not in masks.used]
        if missing:
            raise NotCovered(f"the attention of layers {missing} does not go through the attention interface")
        return logits

    def use_hooks(self) -> None:
        """From now on hand masks to the attention modules themselves."""
        self._through_hooks = True

    @contextmanager
    def _hooks(self, masks: LayerMasks, cache: DynamicCache) -> Iterator[None]:
        def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            given = bound.arguments
            states = next(each for each in given.values() if isinstance(each, Tensor))
            layer, queries = module.layer_idx, states.shape[1]
            columns = cache.get_seq_length(layer) + queries
            own = given.get("attention_mask")
            given["attention_mask"] = masks.narrow(layer, own, queries, columns, _heads(module), states)
            return bound.args, bound.kwargs

        handles = [module.register_forward_pre_hook(narrow, with_kwargs=True) for module in self._modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _modules(self) -> list[Any]:
        """The self-attention modules of the layers.

        Raises:
            NotCovered: some layer has none that takes a mask.
        """
        found = {
            name: module
            for name, module in self._model.named_modules()
            if getattr(module, "layer_idx", None) in self._layers
            and "attention_mask" in inspect.signature(module.forward).parameters
            and "attn" in (type(module).__name__ + name).lower().replace("attention", "attn")
            and not any(word in name for word in ("cross", "encoder_attn"))
        }
        missing = set(self._layers) - {module.layer_idx for module in found.values()}
        if missing:
            raise NotCovered(
                f"the model computes attention in its own code, and layers {sorted(missing)} have no attention module "
                "that takes a mask"
            )
        return list(found.values())


def _heads(module: Any) -> int | None:
    found = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_head"))
    return next((heads for heads in found if isinstance(heads, int)), None)


@contextmanager
def _registered(masks: LayerMasks) -> Iterator[None]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        layer = masks.layer_of(module, key)
        attention_mask = masks.narrow(layer, attention_mask, query.shape[2], key.shape[2], query.shape[1], query, key)
        return own(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(REFERENCE, attend)
    AttentionMaskInterface.register(REFERENCE, eager_mask)
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(REFERENCE, None)
