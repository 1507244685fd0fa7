"""Reading a long prompt in chunks makes no tensor as large as the attention weights of all query heads."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
from hf_paged_eviction.allocators.heads import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = (
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(output) if torch.is_tensor(leaf)
        )
        self.numel = max(self.numel, *sizes, 0)
        return output


@torch.inference_mode()
def test_masks_of_kv_heads_are_not_copied_for_query_heads() -> None:
    model = models.build("llama", "paged_eviction")
    heads = model.config.num_key_value_heads
    shares = [[0.5, *[1.0] * (heads - 2), 1.5]] * model.config.num_hidden_layers
    cache = models.paged(model.config, 64, 8, "keydiff", allocator=Heads.of(shares), heads="separate")
    ids, chunk = torch.randint(3, 99, (1, 320), generator=torch.Generator().manual_seed(0)), 64
    for start in range(0, 320, chunk):
        with Largest() as largest:
            model(ids[:, start : start + chunk], logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    tokens = chunk + max(layer.held for _, layer in cache.paged_layers)
    assert tokens > chunk + 64, "heads differ"
    assert heads < model.config.num_attention_heads
    assert largest.numel < model.config.num_attention_heads * chunk * tokens
