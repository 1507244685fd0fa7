"""`make gpu`: what becomes of steps, what a second call runs again, and the page."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import invoking
from scripts import load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with three steps of its own: fine, broken until a file is there, endless."""
    module = load(SCRIPT)
    fine = "import pathlib; pathlib.Path(r'{out}/summary.json').write_text('[1, 2]'); print('all is well')"
    broken = "import pathlib, sys; sys.exit('broken') if not pathlib.Path(r'{out}/mended').exists() else None"
    endless = "import time; print('going on', flush=True); time.sleep(600)"
    monkeypatch.setattr(module, "_environment", lambda folder: {"PYTHONPATH": ""})
    steps = tuple(
        module.Step(name, f"whether it is {name}", (sys.executable, "-c", code), minutes=minutes)
        for name, code, minutes in (("fine", fine, 5), ("broken", broken, 5), ("endless", endless, 0.002))
    )
    monkeypatch.setattr(module, "STEPS", steps)
    return module


def test_a_step_that_fails_or_hangs_stops_no_other_and_is_run_again(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--work", str(tmp_path), "--output", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    assert gpu.main([*words, "--steps"]) == 1
    report = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))
    assert {name: step["state"] for name, step in report["steps"].items()} == {
        "fine": "done",
        "broken": "failed",
        "endless": "stopped",
    }
    assert report["steps"]["fine"]["result"] == [1, 2] and report["steps"]["broken"]["last_lines"] == ["broken"]
    assert report["facts"]["dry_run"] and report["facts"]["versions"]["torch"]
    page = (tmp_path / "out" / "gpu.md").read_text("utf-8")
    assert "all is well" in page and "| broken | whether it is broken | failed |" in page and "dry run" in page
    assert str(ROOT) not in page and sys.executable not in page

    (tmp_path / "broken" / "mended").touch()
    capsys.readouterr()
    assert gpu.main([*words, "--steps"]) == 1
    output = capsys.readouterr().out
    assert "fine: done already" in output and "broken: done already" not in output
    again = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))["steps"]
    assert again["broken"]["state"] == "done" and again["fine"] == report["steps"]["fine"]


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert load(SCRIPT).main(["--work", str(tmp_path)]) == 1
    assert "--dry-run" in capsys.readouterr().err


def test_every_benchmark_takes_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timing of the list is understood, as it is and in a dry run; nothing is measured."""
    from hf_paged_eviction_eval.bench import run
    from hf_paged_eviction_eval.bench.settings import read
    from hf_paged_eviction_eval.bench.variants import VARIANTS

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    asked: list[Any] = []
    monkeypatch.setattr(run, "run_options", lambda options: asked.append(read(options, VARIANTS)) or True)
    timings = [step for step in load(SCRIPT).STEPS if "--threads" in step.small]
    for step in timings:
        for small in ((), step.small):
            words = [word.format(out=tmp_path, device="cpu") for word in (*step.command, *small)]
            if "bench" in words:
                invoking.run(*words[words.index("bench") :])
                continue
            script = load(Path(words[1]))
            monkeypatch.setattr(script, "measured", lambda options, keys, _: asked.append(list(keys)) or True)
            monkeypatch.setattr(sys, "argv", words[1:])
            assert script.main() == 0
    assert len(asked) == 2 * len(timings) == 12 and all(asked)


TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def rows_of(script: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """What a script of this folder measures on the CPU with a tiny model, and its exit status."""
    from hf_paged_eviction_eval.bench.shapes import SHAPES

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setitem(SHAPES, "100m", TINY)
    more = f"--model 100m --device cpu --output {folder}"
    monkeypatch.setattr(sys, "argv", [script, *words.split(), *more.split()])
    status = load(SCRIPT.with_name(script)).main()
    return status, json.loads((folder / "summary.json").read_text("utf-8"))["rows"]


def test_answers_are_timed_once_and_a_variant_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--requests 3 --input-tokens 100 --output-tokens 8 --batch-size 2 --variants full paged_static_own paged_8"
    status, rows = rows_of("answers.py", f"{words} streaming_llm --budgets 96 100", tmp_path, monkeypatch)
    of = {(row["variant"], row["budget"]): row for row in rows}
    assert status == 1 and list(of) == [("full", None)] + [
        (name, size) for name in ("paged_static_own", "paged_8", "streaming_llm") for size in (96, 100)
    ]
    assert {key for key, row in of.items() if "reason" in row} == {("paged_static_own", 100), ("paged_8", 100)}
    for row in rows:
        if "reason" not in row:
            assert row["rows_together"] == 2
            assert row["tokens_per_second"] == pytest.approx(3 * 8 / row["seconds"])
    assert rows_of("answers.py", f"{words} streaming_llm --budgets 96 100", tmp_path, monkeypatch) == (1, rows)
    status, others = rows_of("answers.py", f"{words} --budgets 96", tmp_path, monkeypatch)
    assert status == 0 and others[0]["seconds"] != rows[0]["seconds"], "other settings are measured anew"


def test_prompts_are_read_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hf_paged_eviction import PagedEvictionCache

    status, rows = rows_of("prefill.py", "--contexts 1024 --budgets 64", tmp_path, monkeypatch)
    assert status == 0 and len(rows) == 10 and all(row["seconds"] > 0 for row in rows)
    script = load(SCRIPT.with_name("prefill.py"))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).eval()
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    torch.manual_seed(0)
    for case in script.cases([1024]):
        fed.clear()
        seconds, cache = script.read_prompt(model, case, 64)
        assert seconds > 0 and sum(fed) == 1024 == cache.get_seq_length()
        assert max(fed) == min(case["chunk"] or 1024, 1024)
        held = cache.stats().largest_held if isinstance(cache, PagedEvictionCache) else 1024
        assert held == (1024 if case["cache"] == "full" else 64)
    assert model.config._attn_implementation == "sdpa"
    assert len(list(script.cases([16384, 32768]))) == 10 + 3
