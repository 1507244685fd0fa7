"""Tensor parallelism: each process holds some of a layer's KV heads, and all have to evict the same tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .models import is_latent_attention


@dataclass(frozen=True)
class LocalHeads:
    """Which of a layer's KV heads this process holds, told from how many there are in the whole model.

    Attributes:
        total: KV heads of the layer in the model; None where the configuration does not say.
        latent: the layer caches latents (MLA), which every process holds as a whole, in transformers releases that do
            not expand them before they are cached.
    """

    total: int | None = None
    latent: bool = False

    @classmethod
    def of(cls, config: Any, layer_idx: int) -> "LocalHeads":
        """The layer's heads as the configuration counts them."""
        return cls.of_layers(config, [layer_idx])[layer_idx]

    @classmethod
    def of_layers(cls, config: Any, layers: Iterable[int]) -> dict[int, "LocalHeads"]:
        """The heads of each of these layers. A configuration is slow to read: it is read once, unless layers differ."""
        text, latent = config.get_text_config(decoder=True), is_latent_attention(config)
        if getattr(text, "per_layer_config", None) is None:
            return dict.fromkeys(layers, cls(_kv_heads(text, 0), latent))
        return {index: cls(_kv_heads(text, index), latent) for index in layers}

    def processes(self, heads: int) -> int:
        """Over how many processes the layer is split, given that `heads` of its heads are here; 1 = it is not."""
        if self.total is None or heads >= self.total or not (dist.is_available() and dist.is_initialized()):
            return 1
        if self.total % heads or (self.latent and heads == 1):
            return 1
        processes = self.total // heads
        return processes if dist.get_world_size() % processes == 0 else 1

    def first_head(self, heads: int) -> int:
        """Index in the model of the first head that is here."""
        processes = self.processes(heads)
        # Neighbouring processes hold one model; each has the heads that follow those of the process before.
        return 0 if processes == 1 else dist.get_rank() % processes * heads

    def check(self, heads: int) -> None:
        """Refuse to decide for all heads together where the processes that hold the layer are only some of all.

        Raises:
            ValueError: with the way out.
        """
        processes = self.processes(heads)
        if processes > 1 and processes != dist.get_world_size():
            raise ValueError(
                f"This process holds {heads} of the {self.total} KV heads of a layer, so the layer is split over "
                f"{processes} processes, but {dist.get_world_size()} run together. What is decided for all heads "
                "together (heads='shared', 'tova', 'adaptive', shares among layers) needs to hear of all of them, and "
                "can only where tensor parallelism spans all processes: launch each copy of the model on its own, or "
                "use heads='separate' with a policy that asks each head alone."
            )

    def gather(self, numbers: Tensor) -> Tensor:
        """Numbers of all heads `[batch, total, ...]` from those of the heads here, the same on every process.

        Gathered rather than summed, so that their mean is worked out in the same order on every process and on one
        alone: no rounding can break a tie differently.

        Raises:
            ValueError: see `check`.
        """
        processes = self.processes(numbers.shape[1])
        if processes == 1:
            return numbers
        self.check(numbers.shape[1])
        numbers = numbers.contiguous()
        parts = [torch.empty_like(numbers) for _ in range(processes)]
        dist.all_gather(parts, numbers)
        return torch.cat(parts, dim=1)


#: All heads are here.
WHOLE = LocalHeads()


def _kv_heads(config: Any, layer_idx: int) -> int | None:
    layers = getattr(config, "per_layer_config", None)
    if layers is not None and layer_idx < len(layers):
        config = layers[layer_idx]
    elif getattr(config, "num_global_key_value_heads", None) is not None:
        return None  # layers differ, and this transformers release does not say in the configuration which is which
    names = ("num_key_value_heads", "num_kv_heads", "decoder_attention_heads", "num_attention_heads")
    heads = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    return heads if isinstance(heads, int) else None
