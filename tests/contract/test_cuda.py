"""What only a CUDA device can show: no synchronisation, CUDA graphs, the kernel that attention chooses."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prefilled(model: object, static: bool, **settings: object) -> PagedEvictionCache:
    ids, mask = (states.cuda() for states in models.left_pad(models.prompts([60, 45, 33], seed=1)))
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "static": static, **settings})
    modes.forward(model, cache, ids, mask, 0, 60)
    return cache


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "random", "h2o", "snapkv"])
def test_the_host_never_waits(policy: str, bits: int | None, static: bool) -> None:
    model = models.build("llama", "paged_eviction").cuda()
    cache = prefilled(model, static, policy=policy, bits=bits)
    token = torch.full((3, 1), 7, device="cuda")
    for step in range(30):
        position = torch.full((3, 1), 60 + step, device="cuda")
        with torch.no_grad(), no_waiting():
            cache.prepare_step()
            model(token, **{CACHE_ARGUMENT: cache}, position_ids=position)
    assert cache.get_seq_length() == 90


@pytest.mark.parametrize("attention", ["sdpa", "paged_eviction"])
def test_generate_compiles_one_graph_and_says_the_same(attention: str) -> None:
    model = models.build("llama", attention).cuda()
    ids, mask = (states.cuda() for states in models.left_pad(models.prompts([60, 45, 33], seed=1)))
    torch._dynamo.reset()
    counters.clear()
    sequences = []
    for static in (False, True, True):
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, static=static)
        sequences.append(modes.generate(model, cache, ids, mask, 100))
    assert torch.equal(sequences[0], sequences[1]) and torch.equal(sequences[0], sequences[2])
    assert counters["stats"]["unique_graphs"] == 1


def test_flash_serves_grouped_queries_once_all_slots_are_real() -> None:
    model = models.build("llama", "paged_eviction").to(device="cuda", dtype=torch.bfloat16)
    ids = torch.stack(models.prompts([60], seed=1)).cuda()
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, static=True)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            logits = model(ids[:, :1], **{CACHE_ARGUMENT: cache}).logits
    assert logits.isfinite().all()
