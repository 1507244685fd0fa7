"""Promises 2, 4 and 5: exact for what is held, bounded, protected.

The recorder checks bound, protection and the keys of every slot after each forward; see tests/support/reference.py.
"""

import pytest
import torch

import models
import modes
from evicting import FOLLOWED, binding, check, exact
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", FOLLOWED)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_every_mode(mode: str, padded: bool, attention: str) -> None:
    check("llama", attention, mode, padded)


PAGED_FAMILIES = [family for family in models.FAMILIES if family not in ("llama", "mistral_sliding")]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "direct", "prompt_lookup"])
@pytest.mark.parametrize("family", PAGED_FAMILIES)
def test_family(family: str, mode: str, padded: bool) -> None:
    reason = models.unavailable(family) or models.cannot_crop(family, mode)
    if reason := reason or models.recurrence_differs(family, mode, padded):
        pytest.skip(reason)
    attention = "eager" if padded == (mode == "direct") else "sdpa"
    # Recurrent layers round differently in a chunk and step by step.
    check(family, attention, mode, padded, heads="separate")


@pytest.mark.parametrize("rows", [1, 17])
def test_batch_sizes(rows: int) -> None:
    model = models.shared("llama")
    cache = binding(model, "greedy", budget=12)
    ids, mask = models.left_pad(models.prompts([1 + (7 * row) % 19 for row in range(rows)], seed=4), 20)
    with exact(model, cache, poison=True):
        modes.generate(model, cache, ids, mask, 16)


@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "value_norm"])
@pytest.mark.parametrize("mode", ["greedy", "direct"])
def test_repeated_tokens(policy: str, mode: str) -> None:
    """The same token all over: in the first layer all scores tie exactly."""
    model = models.shared("llama")
    cache = binding(model, mode, policy=policy)
    ids, mask = models.left_pad([torch.full((length,), 7) for length in modes.LENGTHS])
    with exact(model, cache):
        modes.run(model, cache, mode, ids, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["greedy", "direct"])
def test_low_precision(dtype: torch.dtype, mode: str) -> None:
    """Half precision rounds differently in one long forward, so only the bookkeeping is held to the bit."""
    model = models.build("llama").to(dtype)
    cache = binding(model, mode)
    ids, mask = modes.batch(mode, padded=True)
    with exact(model, cache, poison=True, share=16 * torch.finfo(dtype).eps):
        modes.run(model, cache, mode, ids, mask)
    assert cache.layers[0].keys.dtype == dtype
    assert cache.block_scores().dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_peak_of_a_chunked_prefill(chunk: int) -> None:
    """Budget plus one chunk is the most that attention ever gets; the storage itself never grows beyond it."""
    model = models.shared("llama")
    cache = binding(model, "greedy")
    ids, mask = models.left_pad(models.prompts([120]))
    seen_by_attention = []
    layer = cache.layers[0]
    update = layer.update
    layer.update = lambda *args, **kwargs: seen_by_attention.append(out := update(*args, **kwargs)) or out
    with torch.no_grad():
        modes.generate(model, cache, ids, mask, 5, prefill_chunk_size=chunk)
    assert max(keys.shape[2] for keys, _ in seen_by_attention) <= 24 + (chunk if chunk > 1 else 0)
    assert layer.keys.shape[2] == layer.held == 24
    per_slot = 2 * (layer.keys.shape[-1] + layer.values.shape[-1]) * 4  # two KV heads, fp32
    assert cache.stats().storage_bytes <= 2 * 24 * per_slot * 2


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_direct_forward_without_position_ids(padded: bool) -> None:
    """The model asks the cache where it stands: tokens seen, not tokens kept."""
    model = models.shared("llama")
    cache = binding(model, "greedy")
    ids, _ = models.left_pad(models.prompts([40] * 2))
    with exact(model, cache), torch.no_grad():
        for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 36)), (36, 40)]:
            extra = {"attention_mask": torch.ones(2, stop, dtype=torch.long)} if padded else {}
            model(ids[:, start:stop], **{CACHE_ARGUMENT: cache}, use_cache=True, **extra)
            assert cache.get_seq_length() == stop


def test_second_turn_with_only_the_new_ids() -> None:
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([30]))
    extra = models.prompts([6], seed=9)[0][None]
    results = []
    for only_new in (False, True):
        cache = binding(model, "greedy")
        first = modes.generate(model, cache, ids, mask, 5)
        # The last generated token has not been fed yet.
        full = torch.cat([first, extra], dim=1)
        new_ids = full[:, cache.get_seq_length() :] if only_new else full
        turn = modes.generate(model, cache, new_ids, torch.ones(1, full.shape[1], dtype=torch.long), 5)
        results.append(turn[:, new_ids.shape[1] :].tolist())
    assert results[0] == results[1]
