"""`paged-eviction fit-gate`: a file that the evaluation takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.making import prepare_model
from hf_paged_eviction_eval.caches.policy_names import needs_queries, split_list
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.tasks import make_samples
from hf_paged_eviction_lab.gates import install_gates, load_gates


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command_writes_a_file_that_the_evaluation_takes(tmp_path: Path) -> None:
    text, output = tmp_path / "one.py", tmp_path / "g.safetensors"
    text.write_text(library.source("argparse"))
    fit = ("fit-gate", "--text", text, "--output", output, "--window", 401, "--units", 8, "--epochs", 1)
    result = run(*fit, "--tokens", 1600)
    assert result.exit_code == 0, result.output
    assert "held_out_spearman" in result.stdout
    assert sorted(tmp_path.iterdir()) == [output, text]
    gates = load_gates(output)
    assert list(gates.layers) == [0, 1, 2, 3]
    assert gates.facts["tokens"] == str(4 * 401)
    folder = tmp_path / "run"
    policies = f"gate:{output},gate:embedded,gate:embedded(keep_above=0.05)"
    evaluated = run(
        *("eval", "--policies", policies, "--budgets", "25%", "--tasks", "passkey", "--length", 256),
        *("--limit", 2, "--workers", 1, "--output", folder),
    )
    assert evaluated.exit_code == 0, evaluated.output
    rows = [json.loads(line) for file in folder.glob("rows.*") for line in file.read_text().splitlines()]
    assert {row["policy"] for row in rows} == set(split_list(policies))


def test_refused(tmp_path: Path) -> None:
    result = run("fit-gate", "--text", __file__, "--output", tmp_path / "g.bin")
    assert result.exit_code == 2
    assert "the name of gates ends in .safetensors" in result.stderr
    assert not needs_queries("gate:embedded")
    assert needs_queries("gate:embedded(keep_above=0.1)")


def test_gates_of_another_model_are_refused_by_commands() -> None:
    model = embedded.load()[0]
    model.config.hidden_size += 1
    with pytest.raises(UserError, match=r"'gate:embedded':.*hidden_size 129.*128"):
        prepare_model(model, ["gate:embedded"])


def test_the_gates_that_ship_find_what_is_asked() -> None:
    """At a sixteenth of the prompt, where chance loses it."""
    model, tokenizer = embedded.load()
    samples = make_samples("passkey", tokenizer, 1024, 6, 4321)
    shares = {}
    with install_gates(model, "embedded"):
        for policy in ("gate:embedded", "random"):
            score = 0.0
            for sample in samples:
                context = tokenizer(sample.prompt, return_tensors="pt")
                cache = PagedEvictionCache(model.config, budget=64, policy=policy)
                count = sample.max_new_tokens
                sequences = model.generate(**context, **{CACHE_ARGUMENT: cache}, max_new_tokens=count, do_sample=False)
                answer = tokenizer.decode(sequences[0, context["input_ids"].shape[1] :], skip_special_tokens=True)
                score += sample.score(answer)
            shares[policy] = score / len(samples)
    assert shares["gate:embedded"] >= 0.8
    assert shares["random"] <= 0.2


def test_the_gates_that_ship_say_how_they_were_made() -> None:
    facts = make_policy("gate:embedded").network.facts
    assert facts["target"] == "attention"
    assert int(facts["tokens"]) > 10**5


def test_the_language_models_loss(tmp_path: Path) -> None:
    text, output = tmp_path / "one.py", tmp_path / "g.safetensors"
    text.write_text(library.source("argparse"))
    fit = ("fit-gate", "--text", text, "--output", output, "--window", 301, "--tokens", 600, "--units", 4)
    result = run(*fit, "--target", "straight_through", "--epochs", 1, "--keep", 0.2)
    assert result.exit_code == 0, result.output
    assert "held_out_loss" in result.stdout
    assert sorted(tmp_path.iterdir()) == [output, text]
    assert load_gates(output).facts["keep"] == "0.2"
    assert run(*fit, "--keep", 2).exit_code == 2
