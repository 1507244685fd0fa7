"""An option is written down once: what becomes of it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from batches import make_batch
from hf_paged_eviction import PagedEvictionCache, register_weights
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.options import defaults
from hf_paged_eviction.options.defaults import Default
from hf_paged_eviction_eval import commands
from hf_paged_eviction_eval.bench.settings import BenchSettings
from hf_paged_eviction_eval.caches.budgets import parse_budget
from hf_paged_eviction_eval.caches.making import profile_noted
from hf_paged_eviction_eval.caches.sizes import tokens_held
from hf_paged_eviction_eval.options.base import option
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import Settings
from hf_paged_eviction_eval.running.requests import task_settings
from hf_paged_eviction_eval.running.variants import Variant, make_cache
from invoking import invoke, run

SEEN: list[int] = []


class More(EvalOptions):
    strictness: int = option(3, "How strict.", at_least=1)


def more(options: More) -> None:
    """A command."""
    SEEN.append(options.strictness)


def test_one_field_is_an_option_a_line_of_a_run_file_and_their_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commands.COMMANDS, "more", more)
    file = tmp_path / "run.yaml"
    file.write_text("strictness: 5\n")
    for typed, status, words in (
        ([], 0, ""),
        (["--strictness", "4"], 0, ""),
        (["--config", file], 0, ""),
        (["--strictness", "0"], 2, "--strictness '0': write a whole number from 1 up"),
        (["--strict", "4"], 2, "unknown option --strict: did you mean '--strictness'?"),
        (["--help"], 0, "How strict. Default: 3."),
    ):
        assert words in run("more", *typed, status=status).output
    file.write_text("strictness: 0\n")
    assert "strictness: 0 cannot be used: write a whole number from 1 up" in invoke("more", "--config", file).output
    assert SEEN == [3, 4, 5]


def test_a_command_that_is_unknown_names_the_one_that_was_meant() -> None:
    assert "unknown command evl: did you mean 'eval'?" in run("evl", status=2).output


@pytest.mark.parametrize("command", ["eval", "bench"])
@pytest.mark.parametrize("name", CacheOptions.model_fields)
def test_every_option_of_a_cache_is_one_of_every_command_that_makes_caches(command: str, name: str) -> None:
    assert name in inspect.signature(PagedEvictionCache).parameters
    assert f"--{name.replace('_', '-')} " in run(command, "--help").output
    assert all(name in kind.model_fields for kind in (Settings, BenchSettings))


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_begins_with_what_it_does_examples_and_what_most_people_need(name: str) -> None:
    lines = run(name, "--help", columns=80).output.splitlines()
    assert lines[0].startswith(f"usage: paged-eviction {name}") and len(lines[2]) > 20
    if "Examples:" in lines:
        assert lines.index("Examples:") < lines.index("options:") <= 60
        assert sum(line.startswith(f"  paged-eviction {name}") for line in lines) >= (1 if "fit-" in name else 2)


def test_lines_of_help_break_where_they_are_full() -> None:
    lines = [line.strip() for line in run("eval", "--help", columns=80).output.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("Rows are written"))
    paragraph = lines[start : lines.index("", start)]
    assert len(paragraph) > 2 and all(len(line) > 60 for line in paragraph[:-1])


def test_options_of_a_cache_reach_it(model: Any) -> None:
    options = EvalOptions(block_size=8, heads="separate", sink_tokens=20, budgets="1%,full")
    settings = task_settings(options)
    variant = Variant("keydiff", parse_budget("1%"))
    tokens = variant.budget_tokens(model, settings, (batch := make_batch([60], length=60)), batch.prompts[0])
    assert tokens == 40, "room for the prefix in whole blocks, the newest block, and one to evict"
    cache: Any = make_cache(model, settings, variant, tokens, 60, torch.ones(1, 60, dtype=torch.long))
    ids = torch.arange(60)[None]
    model(ids, **{CACHE_ARGUMENT: cache}, attention_mask=torch.ones_like(ids))
    table = cache.block_table(0)
    assert table.shape == (1, 2, 5, 8) and (table.flatten(2)[..., :20] == torch.arange(20)).all()


@pytest.mark.parametrize(("typed", "expected"), [("4", 4), ("8,4", (8, 4)), (None, None)])
def test_bits_are_one_number_or_two(typed: str | None, expected: Any) -> None:
    assert CacheOptions(bits=typed).cache_arguments["bits"] == expected


@pytest.mark.parametrize("typed", ["5", "x", "4,2,1", "4,"])
def test_bits_that_cannot_be(typed: str) -> None:
    with pytest.raises(ValueError, match="write 8, 4"):
        CacheOptions(bits=typed)


def test_auto_spends_bytes_as_its_default_for_bytes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as so many tokens, which it would hold in the type of the model."""
    model = models.build("llama")

    def chosen(config: Any, budget: object = None, profile: str | None = None) -> tuple[Default, ...]:
        return (Default("keydiff", bits=8 if isinstance(budget, str) else None),)

    monkeypatch.setattr(defaults, "defaults", chosen)
    settings, memory = task_settings(EvalOptions(budgets="48KiB")), 48 * 1024
    variant = Variant("auto", parse_budget("48KiB"))
    tokens = tokens_held(variant.budget, model, settings, "auto", 500)
    cache: Any = make_cache(model, settings, variant, tokens, 500, torch.ones(2, 200, dtype=torch.long))
    assert "bits=8" in repr(cache)
    with torch.no_grad():
        model(torch.randint(3, 90, (2, 200)), **{CACHE_ARGUMENT: cache})
    assert cache.budget == tokens and cache.stats().device_bytes <= 2 * memory


@pytest.mark.parametrize("has_weights", [False, True], ids=["weights not read", "weights read"])
def test_that_there_is_no_profile_is_said_once_the_weights_are_known(
    has_weights: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.build("llama")
    if has_weights:
        register_weights(model)
    with profile_noted():
        PagedEvictionCache(model.config, budget=64)
    assert ("prepare" in capsys.readouterr().err) is has_weights
