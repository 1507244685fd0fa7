"""What goes wrong rarely: disks, devices, files that are none, keys that are pressed."""

import io
import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import hf_paged_eviction_eval.cli
from asking import asked
from hf_paged_eviction_eval import commands, hub
from hf_paged_eviction_eval.console import progress, readable_time
from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models import environment
from hf_paged_eviction_eval.models import loading as models
from hf_paged_eviction_eval.options.settings import EMBEDDED
from hf_paged_eviction_eval.progress import Progress
from hf_paged_eviction_eval.running import batching
from hf_paged_eviction_eval.store.results import ResultFolder, read_rows
from hf_paged_eviction_eval.tasks import get_task


@pytest.mark.parametrize(
    ("missing", "message"), [("matplotlib", "pip install 'hf_paged_eviction[eval]'"), ("other", "")]
)
def test_a_missing_package(missing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the extra brings is named; any other is a defect and keeps its traceback."""

    def run() -> None:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(commands, "main", run)
    with pytest.raises(SystemExit if message else ModuleNotFoundError) as caught:
        hf_paged_eviction_eval.cli.main()
    assert message in str(caught.value)


def test_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with progress(console, "answers") as watch:
        watch(SimpleNamespace(finished=3, begun=0, total=8, last="keydiff [12%]"))  # type: ignore[arg-type]
    assert "3/8" in screen.getvalue()
    assert "keydiff [12%]" in screen.getvalue(), "what is last is no markup"


def test_the_time_left_is_told_and_how_to_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were there before count for nothing, and neither does what comes before the first token."""
    now = 0.0
    monkeypatch.setattr("hf_paged_eviction_eval.console.time.monotonic", lambda: now)
    for console in (
        Console(file=io.StringIO(), width=100),
        Console(file=io.StringIO(), force_terminal=True, width=100),
    ):
        now = 0.0
        with progress(console, "answers", lambda total: f"--limit {total // 500}") as watch:
            watch(Progress(500, 1000))
            for seconds, begun in ((600.0, 0.5), (610.0, 1.0), (630.0, 1.5), (660.0, 2.5)):
                now = seconds
                watch(Progress(500, 1000, "keydiff", begun))
        output = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        assert output.count("note: about 4 h 9 min left for 1,000 answers. Shorter: --limit 2") == 1
        assert "4 h 9 min left" in output and "h 47 min" not in output
    assert [readable_time(seconds) for seconds in (7, 89, 90, 5400)] == ["7 s", "89 s", "2 min", "1 h 30 min"]


def test_a_device_that_fails_is_not_taken_for_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.nn.Module, "to", move)
    with pytest.raises(UserError, match=r"cannot move the model 'embedded' to cpu: CUDA error.*; choose another --dev"):
        models.load(asked(device="cpu"))


SPLIT = "does not fit on all devices together: --dtype bfloat16 halves it$"
CONVERSION = "some issues during automatic conversion of the weights."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), SPLIT),
        (RuntimeError("unable to mmap 5 bytes: Cannot allocate memory (12)"), SPLIT),
        (OSError(12, "Cannot allocate memory"), SPLIT),
        (MemoryError(), SPLIT),
        (RuntimeError("CUDA error: an illegal memory access"), "CUDA error: .*another --device.*CUDA_VIS"),
        (RuntimeError(CONVERSION), "report above; where that names memory"),
        (RuntimeError("Found no NVIDIA driver on your system."), "no NVIDIA driver.*another --device"),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled.*another --device"),
    ],
)
def test_a_device_that_fails_while_a_model_is_split(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(UserError, match=message) as caught:
        models.load(asked(device_map="auto"))
    assert "damaged" not in str(caught.value)
    if message == SPLIT:
        with pytest.raises(UserError, match=r"'embedded' does not fit on cpu.*bfloat16.*--device-map auto"):
            models.load(asked())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({}, torch.float32),
        ({"device": "cuda"}, torch.float32),
        ({"device": "cuda", "model": "other"}, "auto"),
        ({"device": "cpu", "model": "other"}, torch.float32),
    ],
)
def test_the_precision_of_a_run(changes: dict[str, Any], expected: Any) -> None:
    assert models.resolve_dtype(asked(**changes)) == expected
    assert asked().model == EMBEDDED


def test_free_memory_of_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 5, 1: 7, torch.device("cuda:1"): 7}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (free[card], 100))
    assert batching.free_bytes(asked(device="cuda:1")) == 7
    assert batching.free_bytes(asked(device_map="auto")) == 12
    assert batching.free_bytes(asked()) > 12, "a run on the processor has the machine's memory"
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 9)
    assert batching.free_bytes(asked(device="mps")) == 9


def test_cards_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=name, total_memory=80) for name in ("big", "big", "small")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    assert environment.accelerators() == [
        {"name": "big", "count": 2, "memory_bytes": 80},
        {"name": "small", "count": 1, "memory_bytes": 80},
    ]


def test_an_accelerator_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert environment.accelerators() == [{"name": "mps", "count": 1, "memory_bytes": None}]
    assert environment.best_device() == "mps"


def test_a_machine_that_says_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert environment.cpu_name() == "riscv64"
    assert environment._version("no-such-package-anywhere") is None


def test_the_commit_of_a_package_in_a_repository(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init", "--quiet")
    assert environment.commit(package) is None, "a package that is no part of the repository around it"
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert environment.commit(package) == git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    assert environment.commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert environment.commit(package) == git("rev-parse", "HEAD") + "-dirty"


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "rows.0.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*rows\.0\.jsonl"):
        list(read_rows(tmp_path))


def test_rows_that_do_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    folder = ResultFolder(tmp_path, {"": {}}, lambda row: (row["id"],))
    folder.add([{"id": 1}])
    monkeypatch.setattr("hf_paged_eviction_eval.store.results.SYNC_SECONDS", 0)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(UserError, match=r"every.*kept"):
        folder.add([{"id": 2}])
    assert [row["id"] for _, _, row in read_rows(tmp_path)] == [1]


def test_no_mirror_has_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, *_: object, **__: object) -> str:
        raise OSError(f"404 for {repository}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "require_network", lambda wanted: None)
    with pytest.raises(UserError, match=r"(?s)data\.zip.*a/b: 404.*c/d: 404") as error:
        hub.download(("a/b", "c/d"), "data.zip", "r")
    assert "--data-dir" in str(error.value)


def test_an_interpreter_without_sources() -> None:
    with pytest.raises(FileNotFoundError, match="'no_such_module'"):
        library.source("no_such_module")
    assert "def dump" in library.source("json"), "of a package it is the first file"


def test_no_place_for_a_question(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_eviction_eval.tasks.next_line._TRIES", 3)
    with pytest.raises(ValueError, match=r"next_line.*1000000"):
        get_task("next_line").make(tokenizer, 1_000_000, 0)
