"""Tensor parallelism: each process holds some KV heads of a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .models import is_latent_attention


@dataclass(frozen=True)
class LocalHeads:
    """The KV heads of a layer that this process holds, found from their number in the whole model.

    Attributes:
        total: number of KV heads of the layer in the model; None if the configuration does not say.
        latent: the layer caches latents (MLA). Every process holds all of them, in transformers releases that cache
            them before they are expanded.
    """

    total: int | None = None
    latent: bool = False

    @classmethod
    def of_layers(cls, config: Any, layers: Iterable[int]) -> dict[int, "LocalHeads"]:
        """The heads of each of these layers. The configuration is slow to read, so it is read once, unless layers
        differ."""
        text, latent = config.get_text_config(decoder=True), is_latent_attention(config)
        if getattr(text, "per_layer_config", None) is None:
            return dict.fromkeys(layers, cls(_kv_heads(text, 0), latent))
        return {index: cls(_kv_heads(text, index), latent) for index in layers}

    def processes(self, heads: int) -> int:
        """Number of processes that share the layer, if `heads` of its heads are here; 1 = it is not split."""
        if self.total is None or heads >= self.total or not (dist.is_available() and dist.is_initialized()):
            return 1
        if self.total % heads or (self.latent and heads == 1):
            return 1
        processes = self.total // heads
        return processes if dist.get_world_size() % processes == 0 else 1

    def first_head(self, heads: int) -> int:
        """Index in the layer of the first head of this process."""
        processes = self.processes(heads)
        # Neighbouring processes hold one model; each has the heads that follow those of the process before.
        return 0 if processes == 1 else dist.get_rank() % processes * heads

    def gather(self, numbers: Tensor) -> Tensor:
        """Gather numbers of the heads here to those of all heads, `[batch, total, ...]`, the same on every process.

        Raises:
            ValueError: only some of the processes hold the layer.
        """
        heads = numbers.shape[1]
        processes = self.processes(heads)
        if processes == 1:
            return numbers
        if processes != dist.get_world_size():
            raise ValueError(
                f"This process holds {heads} of the {self.total} KV heads of a layer, so the layer is split over "
                f"{processes} processes, but {dist.get_world_size()} run together. What compares heads ('tova', "
                "'adaptive', 'compactor', shares among layers) needs to hear of all of them, and can only where tensor "
                "parallelism spans all processes: launch each copy of the model on its own, or use a policy that asks "
                "each head alone."
            )
        numbers = numbers.contiguous()
        parts = [torch.empty_like(numbers) for _ in range(processes)]
        dist.all_gather(parts, numbers)
        return torch.cat(parts, dim=1)


#: No tensor parallelism: this process holds all heads.
WHOLE = LocalHeads()


def _kv_heads(config: Any, layer_idx: int) -> int | None:
    layers = getattr(config, "per_layer_config", None)
    if layers is not None and layer_idx < len(layers):
        config = layers[layer_idx]
    elif getattr(config, "num_global_key_value_heads", None) is not None:
        return None  # layers differ, and this release of transformers does not name them in the configuration
    names = ("num_key_value_heads", "num_kv_heads", "decoder_attention_heads", "num_attention_heads")
    heads = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    return heads if isinstance(heads, int) else None
