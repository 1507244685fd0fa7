"""Training gates: what a gate learns, what it is trained on, and gates of the embedded model at work."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.preparing.future import DISTANCE
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_lab.gate import Gate, Gates, install_gates, load_gates, save_gates
from hf_paged_eviction_lab.gate.fit import Training, collect, fit_gates, train_layer
from invoking import run


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows(count: int = 4, length: int = 90) -> list[Tensor]:
    return [torch.stack(models.prompts([length, length], seed=seed)) for seed in range(count)]


def test_samples_are_what_eager_attention_says() -> None:
    model = models.build("llama")
    samples = collect(model, windows())
    model.set_attn_implementation("eager")
    for at, window in enumerate(windows()):
        states: dict[int, Tensor] = {}

        def note(module: Any, args: Any, output: Tensor, states: dict[int, Tensor] = states) -> None:
            states[len(states)] = output

        handles = [block.input_layernorm.register_forward_hook(note) for block in model.model.layers]
        with torch.no_grad():
            attentions = model(window, output_attentions=True, use_cache=False).attentions
        [handle.remove() for handle in handles]
        for layer, weights in enumerate(attentions):
            far = torch.ones(90, 90).tril(-DISTANCE)
            paid = (weights.unflatten(1, (2, -1)).mean(2) * far).amax(2)[..., :-DISTANCE]  # [rows, heads, tokens]
            hidden, target = samples[layer][at]
            torch.testing.assert_close(target, paid.transpose(1, 2).flatten(0, 1), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(hidden, states[layer][:, :-DISTANCE].flatten(0, 1))


def test_a_gate_learns_the_mean_of_its_target() -> None:
    """Where the target is a matter of chance, its mean is predicted, not its usual value, which is 0."""
    hidden = draw(16384, 4)
    chance = torch.sigmoid(2 * hidden[:, :1].abs() - 3)
    target = (torch.rand(16384, 1, generator=torch.Generator().manual_seed(1)) < chance).float() * 0.2
    scores = train_layer([(hidden, target)], Training(units=32, epochs=30)).log_scores(hidden).exp()[:, 0]
    wanted = chance[:, 0] * 0.2
    assert float(scores.mean()) == pytest.approx(float(wanted.mean()), rel=0.1)
    for part in (hidden[:, 0].abs() < 0.5, hidden[:, 0].abs() > 1.5):
        assert float(scores[part].mean()) == pytest.approx(float(wanted[part].mean()), rel=0.15)


def test_a_channel_that_never_varies_is_not_blown_up() -> None:
    hidden, target = draw(200, 3), draw(200, 1, seed=4).exp()
    hidden[:, 1] = 5.0
    gate = train_layer([(hidden, target)], Training(units=4, epochs=1))
    moved = gate.log_scores(hidden + torch.tensor([0.0, 1e-3, 0.0]))
    torch.testing.assert_close(moved, gate.log_scores(hidden), rtol=1e-2, atol=1e-2)


def test_a_model_is_left_as_it_was() -> None:
    model = models.build("gemma3")  # one layer slides, so one has a gate
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attention, random = model.config._attn_implementation, torch.get_rng_state()
    fitted = fit_gates(model, windows(), Training(units=8, epochs=1))
    assert list(fitted.layers) == [1]
    assert model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert fit_gates(model, windows(), Training(units=8, epochs=1)).digest == fitted.digest


@pytest.mark.parametrize(
    ("family", "texts", "reason"),
    [
        ("deepseek_v3", windows(), "caches latents"),
        ("llama", windows(1), "2 windows"),
        ("llama", windows(4, DISTANCE), f"{DISTANCE + 1} tokens"),
    ],
    ids=["latents", "one", "short"],
)
def test_refused(family: str, texts: list[Tensor], reason: str) -> None:
    if models.unavailable(family):
        pytest.skip(models.unavailable(family))
    with pytest.raises(ValueError, match=reason):
        fit_gates(models.build(family), texts)


# ---- the embedded model ---------------------------------------------------------------------------------------------


@functools.cache
def trained() -> tuple[Any, Gates, Tensor]:
    """The embedded model, gates that were trained for some steps, and a text."""
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    text = tokenizer(" ".join(Path(__file__).read_text("utf-8").split()), return_tensors="pt")["input_ids"]
    return model, fit_gates(model, text[:, :1200].split(300, dim=1), Training(units=8, epochs=1)), text[:, :200]


def scores(lengths: list[int], chunks: list[int], budget: int = 64) -> list[list[tuple[Any, Tensor]]]:
    """Of rows of these lengths, left-padded, read in chunks: by row, for each layer, positions and scores that are
    held."""
    model, gates, text = trained()
    ids, mask = models.left_pad([text[0, :length] for length in lengths])
    cache = PagedEvictionCache(model.config, budget=budget, block_size=8, policy=Gate(gates))
    start = 0
    with install_gates(model, gates):
        for count in chunks:
            modes.forward(model, cache, ids, mask, start, start + count)
            start += count
            assert all(layer.held <= budget for _, layer in cache.paged_layers)
    assert start == ids.shape[1]
    held = []
    for row, length in enumerate(lengths):
        by_layer = []
        for _, layer in cache.paged_layers:
            places = layer.positions[row].masked_fill(layer.positions[row] >= length - 8, -1)  # not the newest block
            order = places.argsort(-1)
            score = layer.observed["score"][row].masked_fill(places < 0, 0)
            assert (score[places >= 0] > 0).all() and score.isfinite().all()
            by_layer.append((places.gather(-1, order).tolist(), score.gather(-1, order)))
        held.append(by_layer)
    return held


def assert_equal(one: list[tuple[Any, Tensor]], other: list[tuple[Any, Tensor]], rtol: float = 1e-4) -> None:
    for (places, of_one), (there, of_other) in zip(one, other, strict=True):
        length = max(of_one.shape[-1], of_other.shape[-1])
        of_one, of_other = (
            torch.nn.functional.pad(tensor, (length - tensor.shape[-1], 0)) for tensor in (of_one, of_other)
        )
        assert [[at for at in head if at >= 0] for head in places] == [[at for at in head if at >= 0] for head in there]
        torch.testing.assert_close(of_one, of_other, rtol=rtol, atol=0)


def test_a_row_of_the_embedded_model_scores_as_alone() -> None:
    together = scores([150, 97, 50], [120, *[1] * 30])
    for row, length in enumerate((150, 97, 50)):
        alone = scores([length], [length - 30, *[1] * 30])
        assert_equal(together[row], alone[0])


def test_chunks_do_not_change_scores() -> None:
    """Of a budget that holds the text: with a smaller one later hidden states depend on what was evicted."""
    whole = scores([150], [150], budget=256)
    for chunks in ([64, 64, 22], [1] * 150, [7, 1, 1, 90, 51]):
        assert_equal(whole[0], scores([150], chunks, budget=256)[0])


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "g.safetensors"
    text.write_text("The quick fox asks the lazy dog for a code, and the dog tells it: seven, four, nine. " * 90)
    command = ["fit-gate", "--text", text, "--window", 300, "--tokens", 1200, "--units", 8, "--epochs", 1, "--output"]
    result = run(*command, output)
    assert "held_out_spearman:" in result.stdout
    gates = load_gates(output)
    assert list(gates.layers) == [0, 1, 2, 3] and gates.facts["tokens"] == "1200"
    save_gates(gates, tmp_path / "again.safetensors")
    assert load_gates(tmp_path / "again.safetensors").digest == gates.digest
    model = embedded.load()[0]
    gates.check_model(model.config)
    run(*command, tmp_path / "g.bin", status=2)
