"""Budgets in bytes, from the command line to the rows and the report."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import all_rows, make_batch, said
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.caches.budgets import parse_budget, parse_budgets
from hf_paged_eviction_eval.caches.sizes import tokens_held
from hf_paged_eviction_eval.commands.parser import read
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.running.requests import task_settings
from invoking import run
from processes import raw_rows


def test_sizes_are_named_by_their_text() -> None:
    budgets = parse_budgets("1mib, 2 MiB,1.5GB,4096B,3kb,FULL,1MiB")
    assert [size.label for size in budgets] == ["1MiB", "2MiB", "1.5GB", "4096B", "3kB", "full"]
    assert [size.memory for size in budgets] == [2**20, 2**21, 1_500_000_000, 4096, 3000, None]
    for budget in budgets:
        assert parse_budget(budget.label) == budget, "rows, run files and folders name them by their label"
    for wrong in ("2G", "0B", "1.5.2MiB", " , "):
        with pytest.raises(UserError, match="budget"):
            parse_budgets(wrong)


def test_shares_of_memory_are_named_as_the_library_writes_them() -> None:
    budgets = parse_budgets("25% of memory, 12.5%OF Memory,25%,25 % of memory")
    assert [size.label for size in budgets] == ["25% of memory", "12.5% of memory", "25%"]
    assert [size.memory_share for size in budgets] == [Fraction(1, 4), Fraction(1, 8), None]
    assert all(parse_budget(budget.label) == budget for budget in budgets)
    for wrong in ("25% of mem", "120% of memory", "of memory"):
        with pytest.raises(UserError, match=r"12\.5% of memory"):
            parse_budgets(wrong)


@pytest.mark.parametrize("policy", ["keydiff", "auto"])
def test_a_share_of_memory_holds_what_the_cache_alone_would(model: Any, policy: str) -> None:
    """In rows of different length each has a share of its own."""
    settings = TaskSettings(policies=(policy,), budgets=("50% of memory",), tasks=("passkey",))
    batch = make_batch((900, 800))
    rows = all_rows(model, settings, batch)
    for row, prompt in zip(rows, batch.prompts, strict=True):
        alone = PagedEvictionCache(model.config, "50% of memory", policy=policy)
        model(torch.tensor([prompt.context]), **{CACHE_ARGUMENT: alone})
        assert row["budget_tokens"] == alone.budget and row["budget"] == "50% of memory"
        assert row["block_size"] == (16 if policy == "keydiff" else None)


def test_rows_are_those_of_the_tokens_that_fit_whatever_the_batch(model: Any) -> None:
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * 8 * config.num_hidden_layers
    names = ("keydiff", "snapkv(window=4)", "h2o@pyramid")
    settings = TaskSettings(policies=names, budgets=(f"{token * 43}B",), block_size=4, tasks=("passkey",))
    model.set_attn_implementation("paged_eviction")
    try:
        batch = make_batch((150, 131, 70), length=150)
        rows = all_rows(model, settings, batch)
        same = all_rows(model, settings.but(budgets=("40",)), batch)
    finally:
        model.set_attn_implementation("sdpa")
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in same] and said(rows)
    assert {row["budget_tokens"] for row in rows} == {40} and {row["budget"] for row in rows} == {f"{token * 43}B"}
    assert all(row["efficiency"]["kv_bytes"] <= token * 43 for row in rows if row["policy"] == "keydiff")


def test_sizes_that_cannot_be_kept_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match=r"keydiff 100B.*1"):
        tokens_held(parse_budget("100B"), model, CacheOptions(block_size=4), "keydiff", 0)
    with pytest.raises(UserError, match="keydiff@ada_kv 1MiB"):
        tokens_held(parse_budget("1MiB"), model, CacheOptions(block_size=4), "keydiff@ada_kv", 0)


@pytest.mark.parametrize("protect", ["system", "user,last_user", "8:24"])
def test_what_is_protected_takes_none_of_the_bytes_that_are_measured(model: Any, protect: str) -> None:
    budget, plain = parse_budget("64KiB"), CacheOptions(block_size=4)
    options = CacheOptions(block_size=4, protect=protect)
    assert tokens_held(budget, model, options, "keydiff", 0) == tokens_held(budget, model, plain, "keydiff", 0)
    assert tokens_held(budget, model, options, "auto", 0)


def test_a_run_from_the_command_line_and_its_report(tmp_path: Path) -> None:
    output = tmp_path / "run"
    typed = ["--budgets", "128KiB,256KiB,full", "--policies", "keydiff", "--tasks", "kv_recall", "--length", "256"]
    run("eval", *typed, "--limit", 2, "--workers", 1, "--output", output)
    rows = raw_rows(output)
    held = {row["budget"]: row["efficiency"]["kv_bytes"] for row in rows}
    assert held["128KiB"] == 128 * 1024 < held["256KiB"] <= 256 * 1024
    assert {row["budget"]: row["budget_tokens"] for row in rows} == {"128KiB": 64, "256KiB": 128, "full": None}
    (loaded,) = load_runs([output])
    assert list(loaded.frame["budget"].unique()) == ["full", "128KiB", "256KiB"]
    again = task_settings(read(EvalOptions, {"config": output / "run.yaml"}))
    assert again.budgets == ("128KiB", "256KiB", "full")
