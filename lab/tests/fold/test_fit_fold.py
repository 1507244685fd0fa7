"""Fitting kernels: lessons are what the cache would have held, the command goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import embedded_fold as recipe
import pytest
import torch

import invoking
import models
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.parts import join
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.implementations import using
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.policy_names import attention_for
from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_lab.fold import lessons as folding
from hf_paged_eviction_lab.fold import load_kernels
from hf_paged_eviction_lab.fold.fit import Plan, answer, fit_kernels, fit_layer, silent
from hf_paged_eviction_lab.fold.lessons import Lesson, lessons, spans
from training import corpus

PLAN = Plan("keydiff", (24,), "shared", 4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "_CHUNK", 8)


def gather(model: Any, ids: torch.Tensor, plan: Plan = PLAN) -> dict[int, Lesson]:
    with using(model, "paged_eviction"):
        return lessons(model, ids, plan.cache(model.config, 0), 0, [0, 1])


@pytest.mark.parametrize(("policy", "heads"), [("keydiff", "separate"), ("h2o", "shared")])
def test_lessons_are_what_a_cache_held(policy: str, heads: str) -> None:
    """Of the first layer, whose keys do not depend on what was evicted elsewhere."""
    model = models.build("llama")
    ids = models.prompts([60], seed=1)[0][None]
    lesson = gather(model, ids, Plan(policy, (24,), heads, 4))[0]
    assert model.config._attn_implementation == "sdpa"
    assert not lesson.queries.is_inference()
    model.set_attn_implementation("paged_eviction")
    cache = PagedEvictionCache(model.config, 24, 4, policy, heads)
    expected, positions = [], []
    for start, stop in spans(60, 0):
        held = cache.layers[0].positions[0].tolist() if start else [[]] * 2
        with torch.no_grad():
            model(ids[:, start:stop], **{CACHE_ARGUMENT: cache})
        for at in range(start, stop):
            gone = [start - len(own) for own in held]
            if all(gone):
                positions.append(at)
                expected.append(gone)
    assert lesson.queries.shape[2] == len(positions) > 20
    assert lesson.folded.sum(-1)[0].T.tolist() == expected
    whole = model(ids, output_attentions=False)  # forwards still work
    assert whole.logits.isfinite().all()


def test_what_is_held_and_all_together_are_the_target() -> None:
    """With kernels that are exact, attention beside the state would be that to everything."""
    model = models.build("llama")
    for lesson in gather(model, models.prompts([60], seed=1)[0][None]).values():
        group = lesson.queries.shape[1] // lesson.keys.shape[1]
        keys, values = (states.repeat_interleave(group, 1) for states in (lesson.keys, lesson.values))
        folded = lesson.folded.repeat_interleave(group, 1)
        weights = (lesson.queries @ keys.mT * lesson.logits.scaling).exp() * folded
        own = lesson.held.lse.exp()[..., None]
        output = (lesson.held.output * own + weights @ values) / (own + weights.sum(-1, keepdim=True))
        assert_close(output, lesson.target)
        assert (lesson.held.output - lesson.target).abs().max() > 0.05


def test_a_fit_helps_or_says_nothing() -> None:
    model = models.build("llama")
    windows = [ids[None] for ids in models.prompts([64, 96, 64, 96, 64], seed=2)]
    kernels = fit_kernels(model, windows, replace(PLAN, rank=4, middle=8, epochs=12))
    errors = json.loads(kernels.facts["held_out_error"])
    assert list(kernels.layers) == list(map(int, errors)) == [0, 1]
    assert all(folded < 0.9 * dropped for dropped, folded in errors.values())
    lesson = gather(model, windows[0])[0]
    maps, dropped, folded = fit_layer(0, [lesson], [lesson], replace(PLAN, epochs=0))
    assert folded == dropped
    assert torch.allclose(answer(silent(maps), lesson), join([lesson.held], lesson.logits), atol=1e-6)


def test_what_cannot_be_fitted_is_refused() -> None:
    model = models.build("llama")
    short = [ids[None] for ids in models.prompts([20, 20], seed=2)]
    with pytest.raises(ValueError, match="smaller budgets"):
        fit_kernels(model, short, PLAN)
    with pytest.raises(ValueError, match="2 windows"):
        fit_kernels(model, short[:1], PLAN)
    if models.caches_latents():
        with pytest.raises(ValueError, match="caches latents"):
            fit_kernels(models.shared("deepseek_v3"), short, PLAN)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return invoking.invoke("fit-fold", *arguments)


def test_the_command(tmp_path: Path) -> None:
    text, output = tmp_path / "one.py", tmp_path / "whole.safetensors"
    text.write_text(library.source("argparse"))
    small = ("--text", text, "--tokens", 800, "--window", 281, "--policy", "keydiff", "--budgets", "64,96")
    result = run(*small, "--epochs", 1, "--middle", 8, "--rank", 4, "--output", output)
    assert result.exit_code == 0, result.output
    assert "held_out_error" in result.stdout
    assert sorted(tmp_path.iterdir()) == [text, output]
    kernels = load_kernels(output)
    assert kernels.policy == "keydiff" and kernels.facts["budgets"] == "64, 96"
    model = embedded.load(attn_implementation="paged_eviction")[0]
    cache = PagedEvictionCache(model.config, 64, policy="keydiff", disposal=f"fold(file={str(output)!r})")
    with torch.no_grad():
        model(torch.arange(5, 105)[None], **{CACHE_ARGUMENT: cache})
        assert model(torch.arange(5, 6)[None], **{CACHE_ARGUMENT: cache}).logits.isfinite().all()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("--policy", "nothing"), "Unknown policy"),
        (("--budgets", "25% of memory"), "write numbers of tokens, such as 512,1024"),
        (("--window", "100"), "too short"),
        (("--output", "k.bin"), ".safetensors"),
    ],
)
def test_bad_input_is_refused_first(typed: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("word " * 3000)
    result = run("--text", text, "--output", tmp_path / "k.safetensors", *typed)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# ---- the embedded model ----------------------------------------------------------------------------------------------


def test_the_kernels_that_ship_are_those_of_the_recipe() -> None:
    kernels = load_kernels("embedded")
    plan = recipe.PLAN
    assert kernels.policy == plan.policy == "keydiff"
    wanted = {"budgets": "64, 128", "rank": str(plan.rank), "middle": str(plan.middle), "epochs": str(plan.epochs)}
    assert wanted.items() <= kernels.facts.items()
    errors = json.loads(kernels.facts["held_out_error"])
    assert list(map(int, errors)) == list(kernels.layers) == [0, 1, 2, 3]
    assert all(folded < 0.6 * dropped for dropped, folded in errors.values())


def test_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a few short windows of a few modules."""
    texts = [library.source(name).replace("\t", "    ") for name in ("abc", "bisect")]
    monkeypatch.setattr(corpus, "training_texts", lambda: texts)
    monkeypatch.setattr(recipe, "_LENGTHS", (160, 200))
    few = recipe.windows
    monkeypatch.setattr(recipe, "windows", lambda tokenizer, seed: few(tokenizer, seed, 2, 1))
    monkeypatch.setattr(recipe, "PLAN", replace(PLAN, middle=4, epochs=1))
    monkeypatch.setattr("sys.argv", ["fold", "--output", str(tmp_path / "k.safetensors"), "--seed", "7"])
    recipe.main()
    kernels = load_kernels(tmp_path / "k.safetensors")
    assert kernels.facts["windows"] == "3" and list(kernels.layers) == [0, 1, 2, 3]


def test_commands_use_the_attention_that_a_disposal_needs() -> None:
    assert attention_for(["keydiff"], None, "fold(file=embedded)") == "paged_eviction"
    assert attention_for(["keydiff"], "eager", "merge") == "eager"
    assert attention_for([], None, "recall") is None
    with pytest.raises(UserError, match=r"--disposal.*--attn-implementation"):
        attention_for(["keydiff"], "eager", "recall")
    with pytest.raises(UserError, match="No kernels 'nothing'"):
        attention_for(["keydiff"], None, "fold(file=nothing)")
