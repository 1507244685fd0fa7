"""Reading a long prompt in chunks makes no tensor as large as the attention weights of all query heads."""

import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
from hf_paged_eviction.allocators.first_prompt import FirstPrompt
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


def alive() -> int:
    """Bytes of all tensors."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("bits", [None, 4])
@torch.inference_mode()
def test_layers_that_wait_keep_no_copy_of_what_they_hold(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk by which the shares of heads are decided: every layer has what it held, and the new tokens."""
    layers, budget, chunk = 12, 512, 32
    model = models.build("llama", "paged_eviction", num_hidden_layers=layers)
    allocator = FirstPrompt(distance=2)
    cache: Any = models.paged(model.config, budget, 8, "keydiff", allocator=allocator, heads="separate", bits=bits)
    ids = torch.randint(3, 99, (1, budget + chunk), generator=torch.Generator().manual_seed(0))
    model(ids[:, :budget], logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    before, grown = alive(), []
    settle = cache._limits.settle
    monkeypatch.setattr(cache._limits, "settle", lambda real: grown.append(alive() - before) or settle(real))
    model(ids[:, budget:], logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    assert grown, "decided in this chunk"
    token = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert grown[0] < 3 * token * (budget + chunk) < layers * token * budget / 2, "one layer's copy, not all of them"
