"""In few bits, what is read in another way differs by less than a tenth of what the bits themselves change.

Sums in another order move a number by its last digit, and a number between two levels takes the other one then. So the
same tokens are promised for the same cuts read in the same way; of two ways the predictions are compared.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention import in_order
from hf_paged_eviction.precision import fused, native

#: A prompt that overflows, chunks, and single tokens over several blocks, twice.
PLAN = [(0, 60), (60, 80), (80, 100), *((at, at + 1) for at in range(100, 140)), (140, 160), (160, 161), (161, 180)]


def predictions(seed: int, policy: str, bits: int | None) -> Tensor:
    """Logarithms, `[tokens, words]`, of what a text of this seed is read as after its first chunk."""
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([180], seed=seed))
    sizes, draw = (
        (model.config.num_hidden_layers, model.config.num_key_value_heads),
        torch.Generator().manual_seed(seed),
    )
    table: Any = Heads.of(torch.rand(sizes, generator=draw) + 0.2)
    settings: Any = {"budget": 48, "block_size": 4, "policy": policy, "heads": "separate", "bits": bits}
    cache = PagedEvictionCache(model.config, allocator=table, **settings)
    parts = [modes.forward(model, cache, ids, mask, *part)[0] for part in PLAN]
    return torch.cat(parts[1:]).double().log_softmax(-1)


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean over tokens, in nats."""
    return float(kl_div(actual, expected, log_target=True, reduction="none").sum(-1).mean())


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "key_norm"])
@pytest.mark.parametrize("bits", [4, 2])
def test_two_ways_differ_less_than_the_bits(policy: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C and in two parts, and by torch under masks."""
    between, of_bits = 0.0, 0.0
    for seed in range(4):
        exact, fast = predictions(seed, policy, None), predictions(seed, policy, bits)
        with monkeypatch.context() as patch:
            patch.setattr(in_order, "_FLASH", None)
            patch.setattr(fused, "_missing", lambda device: "not now")
            slow = predictions(seed, policy, bits)
        assert not torch.equal(fast, slow)  # they were read in two ways
        between, of_bits = between + divergence(slow, fast), of_bits + divergence(exact, fast)
    assert 0 <= between <= of_bits / 10, (between, of_bits)
