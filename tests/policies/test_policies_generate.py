"""Every policy in a real generate on the model that ships with the harness."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from policy_kinds import NAMES

MODIFIED = (
    "caote(h2o)",
    "caote(snapkv(window=16))",
    "graphkv(paged_eviction)",
    "graphkv(h2o, sources=0.5)",
    "vase(tova)",
    "hybrid(h2o, recency)",
    "hybrid(tova, snapkv(window=16), leverage)",
    "adaptive(tova, paged_eviction)",
)
OLD = ("key_norm", "keydiff", "paged_eviction", "random", "recency", "streaming_llm", "value_norm")
POLICIES = (*sorted(set(NAMES) - set(OLD)), *MODIFIED)
LENGTHS = [101, 74]
STEPS = 10


@cache
def model() -> Any:
    """Its lower half, which is enough to see, in double precision, so that no last bit decides."""
    loaded, _ = embedded.load(torch.float64)
    loaded.model.layers = loaded.model.layers[:2]
    loaded.config.num_hidden_layers = 2
    loaded.set_attn_implementation("paged_eviction")
    return loaded


def generate(rows: list[Tensor], policy: str, heads: Any) -> tuple[Tensor, PagedEvictionCache]:
    ids, mask = models.left_pad(rows)
    held = PagedEvictionCache(model().config, budget=64, block_size=8, policy=policy, heads=heads)
    settings = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        sequences = model().generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: held}, **settings)
    return sequences[:, ids.shape[1] :], held


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_as_alone(policy: str, heads: str) -> None:
    """Tokens, what is held and what is said of it: a left-padded row is the row alone."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, model().config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    together, held = generate(rows, policy, heads)
    assert held.stats().evicted_tokens > 0
    for index, row in enumerate(rows):
        if index == 0 and heads == "shared":
            continue  # has no pads, and is looked at with separate heads
        alone, alone_held = generate([row], policy, heads)
        assert together[index].tolist() == alone[0].tolist()
        for (_, layer), (_, other) in zip(held.paged_layers, alone_held.paged_layers, strict=True):
            assert torch.equal(layer.block_table()[index], other.block_table()[0])
            torch.testing.assert_close(
                layer.block_scores()[index], other.block_scores()[0], rtol=1e-3, atol=1e-5, equal_nan=True
            )


@pytest.mark.parametrize("policy", [*OLD, *POLICIES, "graphkv(key_norm)"])
def test_repeated_tokens(policy: str) -> None:
    """All scores are equal but for noise, in single precision: what a row holds must not hang on it."""
    tiny, held = models.shared("llama", "paged_eviction"), []
    for batch in ([40, 27], [27]):
        ids, mask = models.left_pad([torch.full((length + 6,), 7) for length in batch])
        cache = PagedEvictionCache(tiny.config, budget=24, block_size=4, policy=policy, heads="separate")
        for start, stop in ((0, ids.shape[1] - 6), *((at, at + 1) for at in range(ids.shape[1] - 6, ids.shape[1]))):
            modes.forward(tiny, cache, ids, mask, start, stop)
        held.append([layer.positions[-1].sort(-1).values for _, layer in cache.paged_layers])
    for together, alone in zip(*held, strict=True):
        assert together.tolist() == alone.tolist()


@pytest.mark.parametrize("policy", [name for name in POLICIES if make_policy(name).needs.supports_mla])
def test_latent_attention(policy: str) -> None:
    """A row is as alone where a layer holds latents, which all query heads share."""
    latent = models.shared("deepseek_v3", "paged_eviction")
    rows = models.prompts([40, 33])
    tables = []
    for batch in (rows, rows[1:]):
        ids, mask = models.left_pad(batch)
        held = PagedEvictionCache(latent.config, budget=24, block_size=4, policy=policy)
        for start, stop in ((0, ids.shape[1] - 8), *((at, at + 1) for at in range(ids.shape[1] - 8, ids.shape[1]))):
            modes.forward(latent, held, ids, mask, start, stop)
        tables.append(held.block_table()[-1].tolist())
    assert tables[0] == tables[1]
