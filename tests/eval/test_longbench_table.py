"""LongBench on a real model: the table that is made of kept rows."""

import gzip
import json
from pathlib import Path
from types import ModuleType

import pytest


def test_means_are_of_tasks_and_errors_of_pairs(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {
        ("full", "full"): {"qasper": (1.0, 1.0), "hotpotqa": (0.5, 0.5)},
        ("prepared", "512"): {"qasper": (0.8, 0.6), "hotpotqa": (0.5, 0.5)},
        ("snapkv", "12.5% of memory"): {"qasper": (0.0, 0.0)},  # not all records
    }
    rows = [
        {"cache": cache, "budget": budget, "task": task, "id": str(at), "score": score, "truncated": at == 0}
        for (cache, budget), tasks in scores.items()
        for task, own in tasks.items()
        for at, score in enumerate(own)
    ]
    packed = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "m.jsonl.gz").write_bytes(packed)
    monkeypatch.setattr(generate.longbench_table, "KEPT", tmp_path)
    text = generate.longbench_table.longbench("m")
    assert "| full cache | 1 | 100.0 | 50.0 | 75.0 | 0 |" in text
    # 30 less of one task, whose two records differ by 20 and 40; the other task has no error
    assert "| after `prepare` | 512 tokens | 70.0 | 50.0 | 60.0 | 15.0 ± 5.0 |" in text
    assert "snapkv" not in text and "4 of the 3,750 records, 2 to 2 of a task" in text and "2 prompts lost" in text
