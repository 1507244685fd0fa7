"""Training gates: targets against loops over numbers, the closed form against least squares, and what can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.recipes.fit.calibration import Window, watched
from hf_paged_eviction.recipes.fit.future import Seen
from hf_paged_eviction_lab.gates import install_gates, load_gates, save_gates
from hf_paged_eviction_lab.gates.fit import DISTANCE, fit_gates, fit_line, fit_network
from hf_paged_eviction_lab.gates.samples import watch_repeated
from hf_paged_eviction_lab.gates.training import Training


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows(count: int = 4, length: int = 90) -> list[Window]:
    return [Window(ids[None]) for ids in models.prompts([length] * count, seed=2)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_the_repetition_pays_is_what_eager_attention_says(family: str) -> None:
    """Row by row, without pads; together the rows have some."""
    model = models.build(family)
    rows, probe = models.prompts([14, 9], seed=3), [5, 6, 7]
    ids, mask = models.left_pad(rows)
    by_layer: dict[int, Seen] = {}
    with watched(model):
        watch_repeated(model, Window(ids, mask), probe, lambda seen: by_layer.setdefault(seen.layer_idx, seen))
    model.set_attn_implementation("eager")
    for at, row in enumerate(rows):
        text = [*row.tolist(), *probe, *row.tolist()]
        with torch.no_grad():
            weights = model(torch.tensor([text]), output_attentions=True, use_cache=False).attentions
        for layer, seen in by_layer.items():
            heads = seen.future.shape[1]
            paid = weights[layer][0].unflatten(0, (heads, -1))[:, :, len(row) :, : len(row)].amax((1, 2))
            torch.testing.assert_close(seen.future[at][:, seen.usable[at]], paid, rtol=1e-4, atol=1e-6)
            assert seen.positions[at, 0, seen.usable[at]].tolist() == list(range(len(row)))


def test_the_closed_form_is_least_squares() -> None:
    hidden = draw(300, 5) * torch.tensor([1.0, 10.0, 0.1, 1.0, 3.0]) + 2
    target = (hidden[:, :2] * 0.3 + draw(300, 2, seed=1) / 9).exp()
    gate = fit_line(hidden, target)
    mean, deviation = hidden.mean(0), hidden.std(0, unbiased=False)
    rows = torch.cat([(hidden - mean) / deviation, torch.eye(5) * (1e-2 * 300) ** 0.5]).double()
    wanted = target.log()
    right = torch.cat([wanted - wanted.mean(0), torch.zeros(5, 2)]).double()
    expected = ((hidden - mean) / deviation).double() @ torch.linalg.lstsq(rows, right).solution + wanted.mean(0)
    torch.testing.assert_close(gate.logarithm(hidden).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_number_that_never_varies_is_not_blown_up() -> None:
    hidden, target = draw(200, 3), draw(200, 1, seed=4).exp()
    hidden[:, 1] = 5.0
    for gate in (fit_line(hidden, target), fit_network(hidden, target, Training(units=4, epochs=1))):
        logarithms = gate.logarithm(hidden + torch.tensor([0.0, 1e-3, 0.0]))
        torch.testing.assert_close(logarithms, gate.logarithm(hidden), rtol=1e-2, atol=1e-2)


def test_the_network_learns_the_mean() -> None:
    """Where the target is a matter of chance, its mean is foretold, not its usual value, which is nothing."""
    hidden = draw(16384, 4)
    chance = torch.sigmoid(2 * hidden[:, :1].abs() - 3)
    target = (torch.rand(16384, 1, generator=torch.Generator().manual_seed(1)) < chance).float() * 0.2
    marks = fit_network(hidden, target, Training(units=32, epochs=30))(hidden[None])[0, 0]
    wanted = chance[:, 0] * 0.2
    assert float(marks.mean()) == pytest.approx(float(wanted.mean()), rel=0.1)
    for part in (hidden[:, 0].abs() < 0.5, hidden[:, 0].abs() > 1.5):
        assert float(marks[part].mean()) == pytest.approx(float(wanted[part].mean()), rel=0.15)


@pytest.mark.parametrize("target", ["attention", "kvzip"])
@pytest.mark.parametrize("units", [0, 8])
def test_gates_for_any_model(target: Any, units: int, tmp_path: Path) -> None:
    model = models.build("gemma3")  # one layer slides, so one has a gate
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attention = model.config._attn_implementation
    fitted = fit_gates(model, windows(), Training(target, units=units, epochs=1), probe_ids=[5, 6])
    assert list(fitted.layers) == [1]
    assert model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    save_gates(fitted, tmp_path / "g.safetensors")
    assert load_gates(tmp_path / "g.safetensors").digest == fitted.digest
    assert fitted.facts["target"] == target
    ids, mask = models.left_pad(models.prompts([30]))
    with install_gates(model, tmp_path / "g.safetensors"):
        cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy=f"gate:{tmp_path / 'g.safetensors'}")
        model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False)
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize(
    ("family", "texts", "training", "reason"),
    [
        ("deepseek_v3", 4, {}, "caches latents"),
        ("llama", 1, {}, "2 windows"),
        ("llama", 4, {"target": "size"}, r"target.*kvzip"),
        ("deepseek_v3", 4, {"target": "straight_through"}, "caches latents"),
        ("llama", 4, {"target": "straight_through", "keep": 2.0}, "keep"),
        ("llama", 4, {"units": -1}, r"units.*whole"),
        ("llama", 4, {"target": "kvzip"}, "give probe_ids"),
    ],
)
def test_refused(family: str, texts: int, training: dict[str, Any], reason: str) -> None:
    if models.unavailable(family):
        pytest.skip(models.unavailable(family))
    with pytest.raises(ValueError, match=reason):
        fit_gates(models.build(family), windows(texts), Training(**training))


def test_windows_without_far_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{DISTANCE}"):
        fit_gates(models.build("llama"), windows(4, 40), Training(units=0))
