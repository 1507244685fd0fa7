"""`paged-eviction bench` as a person uses it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench import decoding, run, throughput
from hf_paged_eviction_eval.bench import rows as bench_rows
from hf_paged_eviction_eval.bench.decoder import Decoder
from hf_paged_eviction_eval.bench.methods import VARIANTS, published
from hf_paged_eviction_eval.bench.prefill import Case, cases, read_prompt
from hf_paged_eviction_eval.bench.request import read
from hf_paged_eviction_eval.bench.settings import PRESETS, BenchSettings
from hf_paged_eviction_eval.bench.shapes import SHAPES, config_of
from hf_paged_eviction_eval.bench.table import tables
from hf_paged_eviction_eval.bench.variants import FLOORS
from hf_paged_eviction_eval.models.environment import versions
from hf_paged_eviction_eval.options.bench import BenchOptions
from hf_paged_eviction_eval.options.cache import precision
from invoking import run as run_command
from processes import meta_of, raw_rows

SMALL = "--contexts 64,128 --budgets 48 --block-size 8 --steps 8 --rounds 2 --device cpu"


def bench(words: str, status: int = 0) -> Any:
    return run_command("bench", *words.split(), status=status, columns=160)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small copy, nothing compiled, no collection of garbage, no kvpress whatever is installed."""
    for module in (decoding, throughput, bench_rows):
        monkeypatch.setattr(module, "free_memory", lambda: None)
    monkeypatch.setattr(run, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decoding, "compiled", lambda model: model.forward)
    monkeypatch.setitem(sys.modules, "kvpress", None)


@pytest.mark.usefixtures("drawn")
def test_a_run_and_what_it_writes(model_folder: str, tmp_path: Path) -> None:
    result = bench(f"{SMALL} --model {model_folder} --output {tmp_path}")
    assert "paged / floor" in result.output and "kvpress is not installed" in result.output
    rows = raw_rows(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert summary["rows"] == rows
    assert summary["environment"]["model"]["parameters"] > 0 and summary["environment"]["bandwidth"] == 1e9
    assert summary["settings"]["contexts"] == [64, 128] and summary["settings"]["machine"]["torch"] == torch.__version__
    assert meta_of(tmp_path)["complete"]
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")

    of = {(row["variant"], row["context"]): row for row in rows}
    assert set(of) == {
        *((name, context) for name in VARIANTS if name not in FLOORS for context in (64, 128)),
        ("floor", None),
        ("floor_compiled", None),
    }
    for (name, _), row in of.items():
        assert row["status"] == ("unavailable" if name == "kvpress" else "measured"), row
        if row["status"] != "measured":
            continue
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


def test_kvpress_is_around_the_steps(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[dict[str, Any]] = []

    class DecodingPress:
        def __init__(self, base: Any, **options: Any) -> None:
            self.options = options

        @contextmanager
        def __call__(self, model: Any) -> Iterator[None]:
            entered.append(self.options)
            yield

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(DecodingPress=DecodingPress, KnormPress=lambda: None))
    bench(f"{SMALL} --variants kvpress --model {model_folder} --output {tmp_path}")
    assert entered[0] == {"compression_interval": 8, "target_size": 48} and len(entered) > 4
    assert [row["status"] for row in raw_rows(tmp_path)] == ["measured", "measured"]
    # The context was compressed before: what is read is C tokens, whatever the context.
    assert len({row["bytes_per_step"] for row in raw_rows(tmp_path)}) == 1


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
    # A finished run is shown without a model, another one measured, and all of it anew on demand.
    loaded = run.make_model
    monkeypatch.setattr(run, "make_model", lambda *_: pytest.fail("loaded"))
    assert "paged / floor" in bench(command).output
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="loaded"):
        patch.setattr(run, "versions", lambda: {**versions(), "torch": "1.0"})
        bench(command)
    monkeypatch.setattr(run, "make_model", loaded)
    bench(f"{command} --again")
    assert groups == [1, 2, 2, 1, 2] and raw_rows(tmp_path)[0] != first[0]


def test_contexts_below_the_budget_evict_nothing(model_folder: str, tmp_path: Path) -> None:
    words = "--contexts 40 --budgets 96 --block-size 8 --steps 8 --rounds 1 --variants paged,paged_static --device cpu"
    bench(f"{words} --model {model_folder} --output {tmp_path}")
    assert [row["eviction_share"] for row in raw_rows(tmp_path)] == [0, 0]


def test_throughput(model_folder: str, tmp_path: Path) -> None:
    words = f"--preset paper --model {model_folder} --requests 3 --input-tokens 100 --output-tokens 8 --budgets 96,128"
    variants = "full,paged_static_own,paged_8,streaming_llm"
    result = bench(f"{words} --variants {variants} --batch-size 2 --rounds 2 --device cpu --output {tmp_path}")
    assert "3 requests, 100 tokens in and 8 out" in result.output
    rows = raw_rows(tmp_path)
    measured = [(row["variant"], row["budget"]) for row in rows]
    assert measured == [("full", None), *((name, size) for name in variants.split(",")[1:] for size in (96, 128))]
    assert (tmp_path / "methods.png").exists()
    for row in rows:
        assert row["status"] == "measured" and row["rows_together"] == 2 and not row["compiled"]
        assert row["tokens_per_second"] == pytest.approx(sum(3 * 8 / seconds for seconds in row["rounds_seconds"]) / 2)
        assert row["latency_seconds"] == pytest.approx(sum(row["rounds_seconds"]) / 2 / 2)  # two rounds of two batches


def test_the_paper_is_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = " ".join(bench(f"--preset paper --output {tmp_path}", status=2).output.split())
    assert "llama-3.2-1b is for a CUDA device, and this machine has none" in output and "--model 100m" in output


def test_numbers_of_the_paper_stand_beside_the_same_setup() -> None:
    row = {"variant": "paged_16", "budget": 1024, "input_tokens": 1024, "output_tokens": 8192}
    assert published("llama-3.2-1b", row) == 3020
    assert published("llama-3.2-3b", row) is None and published("llama-3.2-1b", {**row, "budget": 512}) is None
    assert published("llama-3.2-1b", {**row, "variant": "full", "budget": None}) == 2200
    shown = {"rows_together": 8, "compiled": False, "latency_seconds": 2.0, "token_ms": 1.0, "requests": 64}
    measured = {**row, **shown, "tokens_per_second": 100.0, "kind": "throughput", "status": "measured", "reason": ""}
    assert "about 3,020" in str([*tables([measured], "llama-3.2-1b")]) and "about" not in str(
        [*tables([measured], "100m")]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset paper --quick", "leave out --preset paper"),
        ("--variants paged,quest", "unknown variant quest (--variants); choose from full, floor, paged"),
        ("--contexts 1k", "--contexts '1k': write whole numbers"),
        ("--budgets 1000", "--budgets 1000: budget=1000 is not a multiple"),
        ("--budgets 1KiB", "--budgets 1KiB: budget=1,024 bytes is too small"),
        ("--preset prefill --budgets 64,128", "--budgets 64,128: --preset prefill takes one"),
        ("--preset prefill --policy keydiff", "--policy: only for decode steps or whole answers"),
        ("--steps 20", "--steps 20 must be a multiple of the block size 16"),
        ("--steps 1024", "use fewer steps"),
        ("--policy snapkv", "--policy snapkv needs attention"),
        ("--policy nonsense", "--policy nonsense: "),
        ("--device cuda:99", "device 'cuda:99' cannot be used"),
        ("--requests 2", "--requests: only for whole answers; see --preset"),
        ("--preset paper --budgets 144", "--budgets 144 (variant paged_32): budget=144 is not a multiple"),
        (
            "--preset paper --variants floor",
            "unknown variant floor (--variants); choose from full, full_compiled, paged",
        ),
        ("--model /nowhere/at/all --contexts 64 --budgets 64 --steps 16", "cannot load"),
    ],
)
def test_mistakes_are_explained(words: str, message: str, tmp_path: Path) -> None:
    output = " ".join(bench(f"{words} --output {tmp_path}/out", status=2).output.split())
    assert message in output and "Traceback" not in output


@pytest.mark.parametrize(("bits", "tokens"), [(None, (816, 1632)), ("8", (3056, 6208))])
def test_budgets_in_bytes_become_tokens(bits: str | None, tokens: tuple[int, ...]) -> None:
    settings = read(BenchOptions(model="100m", budgets="16MiB,32MiB", bits=bits))
    assert settings.budgets == tokens
    for budget, size in zip(tokens, (2**24, 2**25), strict=True):
        used = [
            PagedEvictionCache(config_of("100m"), budget=held, bits=precision(bits)) for held in (budget, budget + 16)
        ]
        for cache in used:
            cache.early_initialization(1, 4, 64, torch.float32, torch.device("meta"))
        fits, more = (cache.stats().storage_bytes for cache in used)
        assert fits <= size < more


def test_all_of_it_in_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps, answers and prompts are rows of one file."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(SHAPES, "100m", {**tiny, "num_key_value_heads": 1, "vocab_size": 32})
    output = bench(f"--quick --device cpu --output {tmp_path}").output
    assert "decode step, budget 256" in output and "2 requests, 512 tokens in" in output
    assert "time to the first token" in output
    rows = raw_rows(tmp_path)
    assert {row["status"] for row in rows} == {"measured"}
    assert [row["kind"] for row in rows] == ["decode"] * 3 + ["throughput"] * 2 + ["prefill"] * 3


# ---- the time to the first token ------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPTS = {"contexts": (64, 128), "chunk": 16, "chunks": (16, 32), "rounds": 1}


def test_a_run_over_prompts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "prefill", SHAPE)
    monkeypatch.setitem(PRESETS, "prefill", {**PRESETS["prefill"], **PROMPTS})

    def measured() -> list[dict[str, Any]]:
        assert "time to the first token" in bench(f"--preset prefill --output {tmp_path} --budgets 64").output
        return raw_rows(tmp_path)

    lines = measured()
    assert len(lines) == 7 * 2
    (file,) = tmp_path.glob("rows.*")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert len(measured()) == 7 * 2
    monkeypatch.setattr(run, "make_model", lambda *_: pytest.fail("loaded"))
    assert measured()[:13] == lines[:13]


def test_prompts_are_read_as_they_say() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for case in cases(BenchSettings(**PROMPTS)):
        fed.clear()
        seconds, cache = read_prompt(model, case, 64)
        assert seconds > 0 and sum(fed) == case.length == cache.get_seq_length()
        assert max(fed) == (case.chunk or case.length)
        held = cache.stats().largest_held if isinstance(cache, PagedEvictionCache) else case.length
        assert held == (case.length if case.cache == "full" else 64)
        if case.cache != "full":
            assert cache.policy.label.partition("(")[0] == case.cache
    assert model.config._attn_implementation == "sdpa"
    every = list(cases(BenchSettings(contexts=PRESETS["prefill"]["contexts"])))
    assert len(set(every)) == len({case.key(1024) for case in every}) == 4 * 10 + 2 * 3
    assert every[0].length == 2048 and every[-1].length == 65536 and Case(65536, "full", None) in every
