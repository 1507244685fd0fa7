"""`paged-eviction bench` as a person uses it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.options.cache_options import read_bits
from hf_paged_eviction_eval.bench import decoding, run
from hf_paged_eviction_eval.bench.decoder import Decoder
from hf_paged_eviction_eval.bench.settings import read
from hf_paged_eviction_eval.bench.shapes import config_of
from hf_paged_eviction_eval.bench.variants import FLOORS, VARIANTS
from hf_paged_eviction_eval.commands import parser
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.environment import versions
from hf_paged_eviction_eval.options.bench import BenchOptions
from invoking import run as run_command
from processes import meta_of, raw_rows

SMALL = "--contexts 64,128 --budgets 48 --block-size 8 --steps 8 --rounds 2 --device cpu"


def bench(words: str, status: int = 0) -> Any:
    return run_command("bench", *words.split(), status=status, columns=160)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small copy, nothing compiled, no collection of garbage."""
    monkeypatch.setattr(decoding, "free_memory", lambda: None)
    monkeypatch.setattr(run, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decoding, "compiled", lambda model: model.forward)


def test_a_run_and_what_it_writes(model_folder: str, tmp_path: Path) -> None:
    result = bench(f"{SMALL} --model {model_folder} --output {tmp_path}")
    assert "paged / floor" in result.output
    rows = raw_rows(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert summary["rows"] == rows
    assert summary["environment"]["model"]["parameters"] > 0 and summary["environment"]["bandwidth"] == 1e9
    assert summary["settings"]["contexts"] == [64, 128] and summary["settings"]["machine"]["torch"] == torch.__version__
    assert meta_of(tmp_path)["complete"]

    of = {(row["variant"], row["context"]): row for row in rows}
    assert set(of) == {
        *((name, context) for name in VARIANTS if name not in FLOORS for context in (64, 128)),
        ("floor", None),
        ("floor_compiled", None),
    }
    for row in rows:
        assert row["status"] == "measured", row
        assert len(row["rounds_ms"]) == 2
        assert row["step_ms_lowest"] <= row["step_ms"] <= row["step_ms_highest"]
        assert row["tokens_per_second"] == pytest.approx(1000 / row["step_ms"])
        assert row["peak_bytes"] is None  # on a CPU
        assert row["bandwidth_share"] == pytest.approx(row["bytes_per_step"] / 1e9 / (row["step_ms"] / 1000))
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, width, float32
    assert of["paged", 64]["kv_bytes"] == of["paged", 128]["kv_bytes"] == 48 * token
    assert of["floor_compiled", None]["bytes_per_step"] == of["paged_static", 64]["bytes_per_step"]
    assert (
        of["full", 128]["kv_bytes"] == (128 + 2) * token and of["full_compiled", 128]["kv_bytes"] == (128 + 8) * token
    )
    for name in ("paged", "paged_static"):
        assert 0 < of[name, 64]["eviction_share"] < 1
    assert 0 < of["paged", 64]["eviction_share"] < of["paged", 64]["cache_share"] < 1
    assert of["full", 64]["eviction_share"] is None and of["full", 64]["cache_share"] > 0


def test_a_variant_that_fails_stops_no_other(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, decode = decoding.make_cache, Decoder.run

    def broken(name: str, *args: Any) -> Any:
        if name == "floor":
            raise torch.OutOfMemoryError("out of memory")
        return make(name, *args)

    def stumbling(self: Decoder, steps: int) -> float:
        if type(self.held.cache) is DynamicCache and self.held.seen == 128 and steps == 8:  # only when it is timed
            raise ValueError("stumbled\nover this")
        return decode(self, steps)

    monkeypatch.setattr(decoding, "make_cache", broken)
    monkeypatch.setattr(Decoder, "run", stumbling)
    result = bench(f"{SMALL} --variants floor,full,paged --model {model_folder} --output {tmp_path}", status=1)
    of = {(row["variant"], row["context"]): row for row in raw_rows(tmp_path)}
    assert {key for key, row in of.items() if row["status"] == "measured"} == {
        ("full", 64),
        ("paged", 64),
        ("paged", 128),
    }
    assert of["full", 128]["status"] == "failed" and of["full", 128]["reason"] == "stumbled over this"
    assert "out of memory" in of["floor", None]["reason"]
    assert "full at 128 failed: stumbled over this" in result.output


def test_a_run_that_crashed_is_continued(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = f"{SMALL} --contexts 64 --rounds 1 --batch-sizes 1,2 --variants paged,floor"
    command = f"{small} --model {model_folder} --output {tmp_path}"
    measure, groups = decoding.Group.measure, []

    def crashing(self: decoding.Group) -> Any:
        groups.append(self.batch)
        if groups == [1, 2]:
            raise KeyboardInterrupt
        return measure(self)

    monkeypatch.setattr(decoding.Group, "measure", crashing)
    result = bench(command, status=130)
    assert "the same command continues" in result.output
    first = raw_rows(tmp_path)
    assert {row["batch_size"] for row in first} == {1}
    assert json.loads((tmp_path / "summary.json").read_text("utf-8"))["rows"] == first

    bench(command)
    assert groups == [1, 2, 2] and raw_rows(tmp_path)[: len(first)] == first
    # A finished run is shown without a model, another one measured.
    monkeypatch.setattr(run, "make_model", lambda *_: pytest.fail("loaded"))
    assert "paged / floor" in bench(command).output
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="loaded"):
        patch.setattr(run, "versions", lambda: {**versions(), "torch": "1.0"})
        bench(command)


def test_contexts_below_the_budget_evict_nothing(model_folder: str, tmp_path: Path) -> None:
    words = "--contexts 40 --budgets 96 --block-size 8 --steps 8 --rounds 1 --variants paged,paged_static --device cpu"
    bench(f"{words} --model {model_folder} --output {tmp_path}")
    assert [row["eviction_share"] for row in raw_rows(tmp_path)] == [0, 0]


def test_a_share_of_memory_is_refused_with_what_there_is() -> None:
    with pytest.raises(UserError, match=r"--budgets '25% of memory': write tokens.*or bytes"):
        parser.read(BenchOptions, {"budgets": "25% of memory"})


@pytest.mark.parametrize(("bits", "tokens"), [(None, (816, 1632)), ("8", (3056, 6208))])
def test_budgets_in_bytes_become_tokens(bits: str | None, tokens: tuple[int, ...]) -> None:
    settings = read(BenchOptions(model="100m", budgets="16MiB,32MiB", bits=bits), VARIANTS)
    assert settings.budgets == tokens
    for budget, size in zip(tokens, (2**24, 2**25), strict=True):
        used = [
            PagedEvictionCache(config_of("100m"), budget=held, bits=read_bits(bits)) for held in (budget, budget + 16)
        ]
        for cache in used:
            cache.early_initialization(1, 4, 64, torch.float32, torch.device("meta"))
        fits, more = (cache.stats().storage_bytes for cache in used)
        assert fits <= size < more
