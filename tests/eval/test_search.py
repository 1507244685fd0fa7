"""The search on the embedded model: as good as the full grid, stopped and continued, within its bytes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.options.recommend import RecommendOptions
from hf_paged_eviction_eval.recommend import search as searching
from hf_paged_eviction_eval.recommend.run import run_recommend
from hf_paged_eviction_eval.recommend.search import decides, row_key
from hf_paged_eviction_eval.store.results import ResultFolder
from processes import raw_rows

SIZE = "124KiB"
GRID: dict[str, Any] = {
    "policies": "keydiff,recency,tova",
    "allocators": "uniform",
    "bits": "none,8",
    "positions": "text",
    "disposals": "drop,recall(blocks=1)",
    "budgets": SIZE,
    "block_size": 8,
    "length": 128,
    "answer_tokens": 6,
    "prefill_chunk_size": 32,
    "passages": 8,
    "share": 0.27,
}


def options(output: Path, **changes: Any) -> RecommendOptions:
    return RecommendOptions(**{**GRID, "output": output, **changes})


def rows(folder: Path) -> dict[Any, dict[str, Any]]:
    return {row_key(row): row for row in raw_rows(folder)}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything was read here."""
    folder = tmp_path_factory.mktemp("grid")
    run_recommend(options(folder, share=1.0))
    return folder


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    run_recommend(options(folder))
    return folder


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the two searches above are enough."""
    monkeypatch.setattr("hf_paged_eviction_eval.recommend.run.plot_front", lambda *_: None)


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return found


def test_the_choice_is_as_good_as_that_of_the_full_grid(grid: Path, searched: Path) -> None:
    every = rows(grid)
    assert {row["passage"] for row in every.values()} == {name for _, _, name in every} and len(every) == 8 * 9
    means = {
        name: fmean(decides(row, "both") for row in every.values() if row["candidate"] == name)
        for name in {row["candidate"] for row in every.values()} - {"full"}
    }
    chosen = summary(searched)["recommended"][SIZE]["candidate"]
    assert means[chosen] <= 1.02 * min(means.values())
    assert max(means.values()) > 1.3 * min(means.values()), "the choice matters"
    assert summary(searched)["cost"]["share"] <= 0.32 and summary(grid)["cost"]["share"] == pytest.approx(1, abs=0.06)
    again = {key: row["reading"] for key, row in rows(searched).items()}
    assert again == {key: pytest.approx(every[key]["reading"], rel=1e-3, abs=1e-6) for key in again}


def test_nobody_holds_more_than_the_bytes(grid: Path) -> None:
    ours = [row for row in rows(grid).values() if row["candidate"] != "full" and not row["failed"]]
    assert all(row["bytes"] <= 124 * 1024 for row in ours)
    recalled = [row for row in ours if "recall" in row["candidate"] and "bits" not in row["candidate"]]
    assert recalled and all(row["host_bytes"] > 0 and row["held"] < 56 for row in recalled)
    # A cache that is given the bytes settles for as many tokens.
    model = embedded.load()[0]
    cache = PagedEvictionCache(model.config, budget=SIZE, block_size=8, policy="keydiff", bits=8)
    model(embedded.load()[1]("x", return_tensors="pt").input_ids, **{CACHE_ARGUMENT: cache})
    assert {row["held"] for row in ours if row["candidate"] == "keydiff, bits=8"} == {cache.budget}


def test_what_does_not_go_together_is_left_out_with_the_reason(grid: Path) -> None:
    left_out = {name: each["reason"] for each in summary(grid)["left_out"] for name in each["candidates"]}
    assert "recall asks the queries itself" in left_out["tova, disposal=recall(blocks=1)"]
    assert not set(left_out) & {row["candidate"] for row in rows(grid).values()}


def test_a_search_that_was_stopped_goes_on(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StoppedError(BaseException):
        pass

    count, write = 0, ResultFolder.add

    def stop(self: ResultFolder, found: Any) -> None:
        nonlocal count
        count += 1
        if count == 9:
            raise StoppedError
        write(self, found)

    monkeypatch.setattr(ResultFolder, "add", stop)
    with pytest.raises(StoppedError):
        run_recommend(options(tmp_path))
    (written,) = tmp_path.glob("rows.*")
    with written.open("ab") as file:
        file.write(b'{"size": "124K')
    before = rows(tmp_path)
    monkeypatch.undo()
    run_recommend(RecommendOptions(**read_run_file(tmp_path)))
    after = rows(tmp_path)
    assert len(before) == 8 and all(after[key] == row for key, row in before.items())
    assert after.keys() == rows(searched).keys()
    assert summary(tmp_path)["recommended"][SIZE]["candidate"] == summary(searched)["recommended"][SIZE]["candidate"]
    # Once more: nothing is read.
    monkeypatch.setattr(searching, "Reader", None)
    run_recommend(options(tmp_path))
    with pytest.raises(TypeError):  # what other settings found does not count
        run_recommend(options(tmp_path, prefill_chunk_size=64))


def read_run_file(folder: Path) -> dict[str, Any]:
    from hf_paged_eviction_eval.options.run_file import read_run_file

    return read_run_file(folder / "run.yaml", RecommendOptions)


def test_the_code_runs_and_the_files_are_there(searched: Path) -> None:
    code = summary(searched)["recommended"][SIZE]["code"]
    model, tokenizer = embedded.load()
    space = {"model": model, "inputs": tokenizer("some text " * 80, return_tensors="pt")}
    exec(code, space)
    cache = space["cache"]
    assert isinstance(cache, PagedEvictionCache)
    assert cache.stats().storage_bytes + cache.stats().summary_bytes <= 124 * 1024
    assert {"front.png", "front.svg", "run.yaml", "summary.json"} <= {path.name for path in searched.iterdir()}


def test_prompts_need_no_answers(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "".join(json.dumps({"context": f"line {at} " * 40, "question": f"what {at}?"}) + "\n" for at in range(3)),
        "utf-8",
    )
    words = [
        "recommend",
        "--task-file",
        str(file),
        "--budget",
        "50%",
        "--policies",
        "keydiff,recency",
        "--bits",
        "none",
    ]
    words += ["--positions", "text", "--disposals", "drop", "--output", str(tmp_path / "out"), "--question-agnostic"]
    result = CliRunner().invoke(app, [*words, "--max-new-tokens", "4", "--prefill-chunk-size", "64", "--share", "1"])
    assert result.exit_code == 0, result.output
    assert "PagedEvictionCache(model.config, budget=" in result.output and "4 candidates, 3 passages" in result.output
    found = rows(tmp_path / "out")
    assert {row["candidate"] for row in found.values()} == {
        "full",
        "keydiff",
        "recency@pyramid",
        "keydiff@pyramid",
        "recency",
    }


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "how much may be held"),
        (["--budget", "full"], "name sizes only"),
        (["--budget", "nonsense"], "write tokens (256), a share"),
        (["--budget", "64MiB", "--length", "256"], "nothing would have to go"),
        (["--budget", "1MiB", "--text", "missing.txt"], "no such file: missing.txt"),
        (["--budget", "1MiB", "--bits", "5"], "write none, 8, 4, 3 or 2"),
        (["--budget", "1MiB", "--policies", "keydif"], "did you mean 'keydiff'"),
        (["--budget", "1MiB", "--policies", "h2o@cake"], "name allocators in --allocators"),
        (["--budget", "1MiB", "--disposals", "burn"], "--disposals burn"),
        (["--budget", "1MiB", "--length", "64"], "is too short"),
        (["--budget", "1MiB", "--template", "x"], "say --task-file"),
        (["--budget", "1KiB", "--policies", "keydiff"], "left out 4 (keydiff;"),
    ],
)
def test_mistakes_are_told_early(typed: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recommend", *typed, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_fewer_passages_are_read_together_where_memory_runs_out(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = searching.Reader.reference
    together: list[int] = []

    def small(self: Any) -> Any:
        together.append(len(self._passages))
        if len(self._passages) > 3:
            raise MemoryError
        return read(self)

    monkeypatch.setattr(searching.Reader, "reference", small)
    seen: list[int] = []
    monkeypatch.setattr(
        "hf_paged_eviction_eval.recommend.run.progress",
        lambda *_: nullcontext(lambda state: seen.append(state.finished)),
    )
    run_recommend(options(tmp_path, batch_size=7, policies="recency,keydiff", bits="none", disposals="drop", share=1.0))
    assert max(together) > 3 and together[-1] <= 3
    assert seen == sorted(seen) and len(set(seen)) > 6, "told candidate by candidate"
    every = {key: row["reading"] for key, row in rows(tmp_path).items()}
    same = {key: row["reading"] for key, row in rows(searched).items() if key in every}
    assert len(same) > 4 and same == {key: pytest.approx(every[key], rel=1e-3, abs=1e-6) for key in same}
