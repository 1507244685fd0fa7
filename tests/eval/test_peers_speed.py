"""`benchmarks/peers_speed.py` measures what runs here, says of the rest why not, and goes on where it was."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def tiny(_: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "peers_speed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("peers_speed")
    monkeypatch.setattr(module, "MODELS", {"tiny": ("tiny", torch.float32)})
    monkeypatch.setattr(module, "config_of", tiny)
    monkeypatch.setattr(module, "BUDGET", 64)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return module


def test_rows_are_measured_once(speed: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    words = ["--models", "tiny", "--lengths", "160", "--tokens", "4", "--output", str(path), "--candidates"]
    for candidates in ("eager", "eager,4 bits,heads,same tokens"):
        speed.main([*words, candidates])
    rows = {(row["candidate"], row["rows"]): row for row in speed.load_rows(path)}
    assert len(rows) == len(path.read_text().splitlines()) == 8
    for row in rows.values():
        assert "refused" not in row, row["refused"]
        assert row["ratio"] > 0 and row["bytes"] < row["dynamic_bytes"]
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


def test_what_does_not_fit_is_not_tried(speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MOST_BYTES", 1000)
    case = speed.Case("token", "tiny", 160, 1, "eager")
    assert speed.full_bytes(case) == 2 * 2 * 2 * 16 * 4 * 160
    assert "refused" in speed.measure(case, None, 4)


def test_tensors_without_memory_are_not_counted(speed: Any) -> None:
    before = speed.tensor_bytes()
    with FakeTensorMode():
        fake = torch.empty(1000)
    sparse = torch.eye(8).to_sparse()
    own = torch.empty(1000)
    assert speed.tensor_bytes() - before == own.nbytes
    del fake, sparse
