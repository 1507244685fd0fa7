"""The simulation of dropping a victim at once sees exactly what the paper's cache would hold."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from reference import masked_logits

BUDGET, BLOCK, PROMPT, LENGTH = 24, 4, 41, 70


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("lazy_reuse")


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "random"])
@torch.no_grad()
def test_logits_are_those_of_the_tokens_that_are_left(benchmark: Any, model: Any, policy: str, heads: Any) -> None:
    showing = deepcopy(model)
    showing.set_attn_implementation(PAGED_EVICTION)
    ids = torch.randint(2, 600, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    sizes = {"budget": BUDGET, "block_size": BLOCK, "policy": policy, "heads": heads}
    cache = benchmark.make_cache(showing, "at once", torch.ones_like(ids), **sizes)
    prompt = [[set(range(column + 1))] * 2 for column in range(PROMPT)]
    visible: dict[int, Any] = {layer: [[heads, heads] for heads in prompt] for layer in range(2)}
    found, counts = [showing(ids[:, :PROMPT], past_key_values=cache).logits], []
    for column in range(PROMPT, LENGTH):
        found.append(showing(ids[:, column : column + 1], past_key_values=cache).logits)
        for layer in range(2):
            paged = cache.layers[layer]
            held = paged.positions.masked_fill(paged.left_over(), -1).tolist()
            visible[layer].append([[{place for place in head if place >= 0} for head in row] for row in held])
        counts.append(len(visible[0][-1][0][0]))
    first = BUDGET - BLOCK + 1
    assert counts[:8] == [first, first + 1, first + 2, BUDGET] * 2
    newest = set(range(LENGTH - BLOCK, LENGTH))
    assert all({*range(BLOCK), *newest} <= head for row in visible[1][-1] for head in row)
    positions = torch.arange(LENGTH).expand(2, -1)
    embeds = model.get_input_embeddings()(ids)
    expected = masked_logits(model, embeds, torch.ones_like(ids), positions, visible)
    # Eager attention takes its softmax in single precision.
    assert_close(torch.cat(found, dim=1), expected)


@torch.no_grad()
def test_padded_rows_drop_what_they_would_alone(benchmark: Any, model: Any) -> None:
    showing = deepcopy(model)
    showing.set_attn_implementation(PAGED_EVICTION)
    ids = torch.randint(2, 600, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    sizes = {"budget": BUDGET, "block_size": BLOCK, "policy": "keydiff"}

    def run(ids: torch.Tensor, mask: torch.Tensor, prompt: int) -> torch.Tensor:
        cache = benchmark.make_cache(showing, "at once", mask, **sizes)
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = []
        for start, stop in [(0, prompt), *((column, column + 1) for column in range(prompt, ids.shape[1]))]:
            output = showing(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=places[:, start:stop],
                past_key_values=cache,
            )
            logits.append(output.logits[:, -1])
        return torch.stack(logits, dim=1)

    together, alone = run(ids, mask, PROMPT), run(ids[1:, 13:], mask[1:, 13:], PROMPT - 13)
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-9)


@torch.no_grad()
def test_the_lazy_way_is_the_cache_itself(benchmark: Any, model: Any) -> None:
    showing = deepcopy(model)
    showing.set_attn_implementation(PAGED_EVICTION)
    ids = torch.randint(2, 600, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    sizes: dict[str, Any] = {"budget": BUDGET, "block_size": BLOCK, "policy": "keydiff"}
    found = []
    for network, cache in (
        (showing, benchmark.make_cache(showing, "lazy", None, **sizes)),
        (showing, benchmark.make_cache(showing, "at once", None, **sizes)),
        (model, PagedEvictionCache(model.config, **sizes)),
    ):
        network(ids[:, :PROMPT], past_key_values=cache)
        steps = range(PROMPT, LENGTH)
        found.append(torch.cat([network(ids[:, at : at + 1], past_key_values=cache).logits for at in steps], dim=1))
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-9)
    assert (found[1] - found[2]).abs().max() > 1e-3
