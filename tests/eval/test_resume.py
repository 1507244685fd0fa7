"""A run that was stopped, however, ends with the rows of one that was not."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import Commands, meta_of, raw_rows, rows_of

LIMIT = 4
ROWS = 2 * LIMIT * (1 + 2)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rows.*"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.all_cases)])
def test_killed_again_and_again(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path, seed: int
) -> None:
    """In the middle of a row, and anywhere: while it loads, reads, writes."""
    chance, command, size = random.Random(seed), [*words, "--output", str(tmp_path)], size_of(expected)
    for _ in range(2):
        status, output = commands.run(command, most_bytes=int(0.36 * size) + chance.randint(0, 400), deadly=True)
        assert status == -signal.SIGXFSZ, output
        child = commands.start(command, most_bytes=size // 10, deadly=True)  # however late it is killed
        time.sleep(chance.random() / 4)
        child.kill()
        child.wait()
    assert 0.7 * size < size_of(tmp_path)
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)
    meta, before = meta_of(tmp_path), meta_of(expected)
    assert meta["rows"] == {"finished": ROWS, "wanted": ROWS} and meta["complete"]
    assert meta["tasks"] == before["tasks"] and meta["settings"] == before["settings"]
    assert (tmp_path / "summary.json").read_text() == (expected / "summary.json").read_text()
    assert not [*tmp_path.glob("*.partial"), *tmp_path.glob(".*.partial")]


def test_the_file_of_a_run(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    """It continues the run, where nothing is done twice, or repeats a part of it elsewhere."""
    config, before = str(expected / "run.yaml"), {path: path.read_bytes() for path in expected.glob("rows.*")}
    status, output = commands.run(["eval", "--config", config])
    assert status == 0 and f"{ROWS}/{ROWS}" in output and "\x1b" not in output and "\r" not in output
    assert {path: path.read_bytes() for path in expected.glob("rows.*")} == before
    status, output = commands.run(["eval", "--config", config, "--output", str(tmp_path), "--limit", "1"])
    assert status == 0, output
    assert [row for row in rows_of(expected) if row["id"].endswith("/0")] == rows_of(tmp_path)


def test_a_folder_holds_what_was_asked_and_no_more(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path
) -> None:
    """More policies, budgets, tasks and samples than before; other settings."""
    few = " ".join(words).replace("passkey,kv_recall", "passkey").replace("paged_eviction,recency", "recency")
    few = few.replace(f"--limit {LIMIT}", "--limit 3").replace("10%,full", "10%")
    status, output = commands.run([*few.split(), "--output", str(tmp_path)])
    assert status == 0 and len(rows_of(tmp_path)) == 3, output
    status, output = commands.run([*words, "--output", str(tmp_path)])
    assert status == 0, output
    assert sorted(map(_without_costs, rows_of(tmp_path))) == sorted(map(_without_costs, rows_of(expected)))
    assert meta_of(tmp_path)["tasks"] == meta_of(expected)["tasks"] and meta_of(tmp_path)["complete"]
    # Less than what is there: nothing to do, and the table shows what was asked.
    status, output = commands.run([*few.split(), "--output", str(tmp_path)])
    assert status == 0 and "3/3" in output and "paged_eviction" not in output and len(rows_of(tmp_path)) == ROWS
    # Another budget and length for one policy: three rows, not a grid of them.
    more = few.replace("160", "200").replace("10%", "20%").split()
    status, output = commands.run([*more, "--output", str(tmp_path)])
    assert status == 0 and len(rows_of(tmp_path)) == ROWS + 3, output
    status, output = commands.run([*more, "--seed", "1", "--output", str(tmp_path)])
    assert status == 0 and len(rows_of(tmp_path)) == ROWS + 6, output
    assert f"{ROWS + 3} rows here are of other settings and stay where they are (seed: 0 there, 1 now)" in output


def _without_costs(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "efficiency"}, sort_keys=True)


def test_other_weights_behind_the_same_path(
    commands: Commands, words: list[str], model_folder: str, expected: Path, tmp_path: Path
) -> None:
    """And a configuration that computes another way with the same weights; never two models in one table."""
    import torch
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    command = " ".join(words).replace(model_folder, str(model)).split()
    command += ["--policies", "recency", "--limit", "2", "--output", str(tmp_path / "out")]

    def run() -> list[Any]:
        status, output = commands.run(command)
        assert status == 0 and ("weights: " in output) == bool(raw_rows(tmp_path / "out")[8:]), output
        return [row for row in raw_rows(tmp_path / "out") if f'"{row["settings"]}"' in _digests(tmp_path / "out")]

    first = run()
    weights = load_file(model / "model.safetensors")
    # One number in the middle of one tensor.
    name = max(weights, key=lambda key: weights[key].numel())
    weights[name] = torch.randn_like(weights[name].float()).to(weights[name].dtype) * 0.02
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    second = run()
    assert len(second) == len(first) == 8 and len(raw_rows(tmp_path / "out")) == 16
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    run()
    assert len(raw_rows(tmp_path / "out")) == 24


def _digests(folder: Path) -> str:
    return json.dumps(meta_of(folder)["digests"])
