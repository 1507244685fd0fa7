"""Gates that are trained by the language model's loss: the attention that they stand in, and its gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.recipes.fit.calibration import DISTANCE, Window
from hf_paged_eviction_lab.gates import Gates, install_gates, load_gates, save_gates
from hf_paged_eviction_lab.gates.fit import fit_gates
from hf_paged_eviction_lab.gates.gated_attention import gated, shut_softmax, straight_through
from hf_paged_eviction_lab.gates.install import attention_modules
from hf_paged_eviction_lab.gates.training import Training


def windows(count: int = 5, length: int = DISTANCE + 40) -> list[Window]:
    """Of each, the second half says the first again: what is far matters."""
    windows_read = []
    for ids in models.prompts([length // 2] * count, seed=2):
        windows_read.append(Window(torch.cat([ids, ids])[None]))
    return windows_read


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_with_open_gates_it_is_the_attention_of_the_model(family: str) -> None:
    """Also with soft-capping, sinks, layers that slide, and pads."""
    if models.unavailable(family):
        pytest.skip(models.unavailable(family))
    model = models.build(family)
    ids, mask = models.left_pad(models.prompts([90, 70]))
    real = mask.bool()
    modules = attention_modules(model)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        with gated(model, modules) as layers:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            assert all(layer.kv_heads == 2 for layer in layers.values())
            for layer in layers.values():
                layer.gate = lambda hidden: torch.full((2, hidden.shape[1], 2), 5.0)
            opened = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for layer in layers.values():
                layer.gate = lambda hidden: torch.full((2, hidden.shape[1], 2), -5.0)
            shut = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(opened[real], logits[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(shut[0, -1], logits[0, -1], atol=1e-2)
    torch.testing.assert_close(shut[0, :DISTANCE], logits[0, :DISTANCE], rtol=1e-3, atol=1e-3)  # all is near
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_token_that_is_shut_out_gets_no_attention_and_a_gradient() -> None:
    logits = torch.tensor([2.0, 9.0, 1.0, 0.5]).view(1, 1, 1, 1, 4)
    odds = torch.tensor([3.0, -1.0, 2.0, 1.0], requires_grad=True)
    soft = odds.sigmoid()
    opened = ((odds > 0).to(soft) + soft - soft.detach()).view(1, 1, 1, 1, 4)
    weights = shut_softmax(logits, opened)
    expected = logits.clone()
    expected[..., 1] = -torch.inf
    torch.testing.assert_close(weights, expected.softmax(-1))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (weights * values).sum().backward()
    # As if its logit were that of the largest token that is let through.
    shares = (logits - 2).clamp_max(0).exp().flatten()
    total = shares[[0, 2, 3]].sum()
    output = (weights.detach().flatten() * values).sum()
    slope = soft.detach() * (1 - soft.detach())
    torch.testing.assert_close(odds.grad, shares / total * (values - output) * slope)


def test_what_is_near_is_let_through() -> None:
    opened = straight_through(torch.full((1, 2, DISTANCE + 3), -1.0), DISTANCE + 3)
    assert opened.shape == (1, 2, 1, DISTANCE + 3, DISTANCE + 3)
    far = torch.ones(DISTANCE + 3, DISTANCE + 3).tril(-DISTANCE)
    torch.testing.assert_close(opened[0, 1, 0], 1 - far)


def held_out(gates: Gates) -> dict[str, float]:
    return json.loads(gates.facts["held_out_loss"])  # type: ignore[no-any-return]


def kept(gates: Gates) -> list[float]:
    return list(json.loads(gates.facts["held_out_kept"]).values())


def test_its_loss_falls_and_the_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_eviction_lab.gates.straight_through._RATE", 0.04)
    model = models.build("llama")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    learning = [parameter.requires_grad for parameter in model.parameters()]
    start, end = (fit_gates(model, windows(), Training("straight_through", 8, epochs, 0.25)) for epochs in (1, 10))
    assert held_out(start)["full"] == held_out(end)["full"]

    def loss(of: Gates) -> float:
        return held_out(of)["gated"] + 5.0 * sum(abs(share - 0.25) for share in kept(of)) / 2

    assert loss(end) < loss(start) - 0.5
    assert all(abs(share - 0.25) < 0.2 for share in kept(end))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == learning
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert end.facts["target"] == "straight_through"
    save_gates(end, tmp_path / "g.safetensors")
    assert load_gates(tmp_path / "g.safetensors").digest == end.digest
    with install_gates(model, end):
        cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy=f"gate:{tmp_path / 'g.safetensors'}")
        ids, mask = models.left_pad(models.prompts([30]))
        model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False)
    assert cache.stats().evicted_tokens > 0
