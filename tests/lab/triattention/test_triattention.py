"""TriAttention: the tokens that its authors' code keeps, the formula in complex numbers, rows with pads, refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.policies import registry
from hf_paged_eviction.recipes.fit.calibration import Window
from hf_paged_eviction_eval import embedded
from policy_inputs import SPEEDS, STRETCH, heads_of, text, turned

PEERS = Path(__file__).parents[2] / "data" / "peers"


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    """The module; afterwards its policy has no name any more, because other tests compare the names with a file."""
    known = dict(registry.POLICIES.classes)
    yield importlib.import_module("hf_paged_eviction.lab.triattention")
    registry.POLICIES.classes = known


def test_kept_tokens_are_the_authors(lab: Any, tmp_path: Path) -> None:
    model, _ = embedded.load(attn_implementation="paged_eviction")
    ids = torch.tensor([json.loads((PEERS / "kept.json").read_text())["input_ids"]])
    lab.save_centres(lab.find_centres(model, [Window(ids)]), tmp_path / "c.safetensors")
    policy = lab.TriAttention(str(tmp_path / "c.safetensors"))
    cache = PagedEvictionCache(model.config, budget=160, policy=policy, heads="separate", block_size=1, sink_tokens=0)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    theirs = json.loads((PEERS / "triattention.json").read_text())["kept"]["triattention"]
    for layer, sets in zip(cache.layers, theirs, strict=True):
        for head, kept in zip(layer.positions[0].tolist(), sets, strict=True):
            expected = {t for t in range(ids.shape[1]) if int(kept, 16) >> t & 1}
            assert len(set(head) & expected) >= 0.98 * len(expected)


def test_the_formula_in_complex_numbers(lab: Any, tmp_path: Path) -> None:
    """Two pairs of channels turn and two channels do not; rows have pads, and slots are in no order."""
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(2, 2, 6, generator=generator)
    length = torch.rand(2, 2, 4, generator=generator)[..., [0, 1, 0, 1]] + 2  # a pair has one
    lab.save_centres(lab.Centres({1: {"mean": mean, "length": length}}, {}), tmp_path / "c.safetensors")
    policy = lab.TriAttention(str(tmp_path / "c.safetensors"), farthest=5)
    given = text().shuffled(3)
    found = policy.score(given.context(policy, []))
    for row in range(3):
        for at, head in enumerate(heads_of(given, row)):
            each = []
            for query, size in zip(mean[at].tolist(), length[at].tolist(), strict=True):
                scores = []
                for key in head.keys:
                    turns = [turned(query, head.length + distance) for distance in (1, 2, 4)]
                    score = sum(sum(a * b for a, b in zip(turn, key, strict=True)) for turn in turns) / 3
                    for f in range(len(SPEEDS)):
                        rest = size[f] - abs(complex(query[f], query[f + 2]))
                        score += rest * STRETCH * abs(complex(key[f], key[f + 2]))
                    scores.append(score)
                middle = sum(scores) / len(scores)
                deviation = (sum((x - middle) ** 2 for x in scores) / len(scores)) ** 0.5
                each.append([(x - middle) / deviation for x in scores])
            real = given.positions[row, at] >= 0
            expected = torch.tensor([max(pair) for pair in zip(*each, strict=True)])
            torch.testing.assert_close(
                found[row, at, real], expected[given.positions[row, at, real]], rtol=1e-4, atol=1e-4
            )


def test_padded_windows_have_the_centres_of_their_rows(lab: Any) -> None:
    model = models.build("llama")
    rows = models.prompts([40, 25], seed=2)
    ids, mask = models.left_pad(rows)
    together = lab.find_centres(model, [Window(ids, mask)])
    apart = lab.find_centres(model, [Window(row[None]) for row in rows])
    for index, parts in apart.layers.items():
        for name, tensor in parts.items():
            torch.testing.assert_close(together.layers[index][name], tensor, rtol=1e-4, atol=1e-5)


def test_padded_rows_are_as_alone(lab: Any, tmp_path: Path) -> None:
    model = models.build("llama")
    rows = models.prompts([60, 41], seed=2)
    lab.save_centres(lab.find_centres(model, [Window(rows[0][None])]), tmp_path / "c.safetensors")
    assert lab.load_centres(tmp_path / "c.safetensors").facts == {"tokens": "60"}

    def said(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        policy = lab.TriAttention(str(tmp_path / "c.safetensors"))
        cache = PagedEvictionCache(model.config, budget=24, policy=policy, block_size=4)
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, do_sample=False)
        return out[:, ids.shape[1] :]

    together = said(*models.left_pad(rows))
    for at, row in enumerate(rows):
        assert torch.equal(together[at], said(*models.left_pad([row]))[0])


def test_another_model_is_refused(lab: Any, tmp_path: Path) -> None:
    model = models.build("llama")
    lab.save_centres(lab.find_centres(model, [Window(models.prompts([20])[0][None])]), tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="These query centres were found for another model"):
        lab.TriAttention(str(tmp_path / "c.safetensors")).check_model(models.build("gemma3").config)
    with pytest.raises(ValueError, match="No query centres"):
        lab.TriAttention("nowhere")
    with pytest.raises(ValueError, match="latents"):
        lab.find_centres(models.build("deepseek_v3"), [])
