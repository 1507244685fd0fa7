"""Texts to predict: files and datasets as they come, and what is wrong with them in one line."""

import json
import socket
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from hf_paged_eviction_eval.data.sources import place_of_dataset
from hf_paged_eviction_eval.data.texts import Text, read_dataset, read_texts
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.tasks import held_out_texts


def write(path: Path, *records: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def contents(texts: Any) -> list[str]:
    return [text.content for text in texts]


def test_files_are_read_in_turns(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", {"text": "1"}, {"context": "3", "text": "no"}, {"text": "4"})
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf2\r\n")
    texts = read_texts([lines, str(tmp_path / "b.txt")])
    assert texts == [
        Text(f"{lines}:1", "1"),
        Text(f"{tmp_path / 'b.txt'}", "2\n"),
        Text(f"{lines}:2", "3"),
        Text(f"{lines}:3", "4"),
    ]


def test_without_anything_the_held_out_modules_are_read() -> None:
    assert {text.name: text.content for text in read_texts([])} == held_out_texts()


@pytest.mark.parametrize(
    "content,complaint",
    [
        (b'{"text": "a"}\n{"text":\n', "line 2: not JSON"),
        (b'{"text": "a"}\n\n"text"\n', 'line 3: "text" is not a record'),
        (b'{"text": 3, "contexts": "x"}', "line 1: no text in 'context' or 'text': .*3"),
        (b"{}", "line 1: no text"),
        (b'{"text": "\\ud800"}', "line 1: 'text' is .*surrogates not allowed"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "line 1: not JSON|line 1: no text"),
    ],
)
def test_a_bad_line_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"a.jsonl, {complaint}" if "line" in complaint else complaint):
        read_texts([str(path)])


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n\xff")
    with pytest.raises(UserError, match=r"b.txt.*3.*UTF-8"):
        read_texts([str(tmp_path / "b.txt")])
    with pytest.raises(UserError, match=r"none\.txt: cannot be read"):
        read_texts([str(tmp_path / "none.txt")])
    with pytest.raises(UserError, match="cannot be read"):
        read_texts([str(tmp_path)])


def test_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of_dataset("owner/name") == ("owner/name", None, None, None)
    assert place_of_dataset("owner/name:en") == ("owner/name", "en", None, None)
    assert place_of_dataset("owner/name:en:test") == ("owner/name", "en", "test", None)
    assert place_of_dataset("owner/name::test") == ("owner/name", None, "test", None)
    assert (
        place_of_dataset("owner/name@v2:en")
        == ("owner/name", "en", None, "v2")
        == place_of_dataset("owner/name:en", "v2")
    )
    (tmp_path / "c@d").write_text("x")
    assert place_of_dataset("c@d", "v2") == ("c@d", None, None, "v2")
    with pytest.raises(UserError, match=r"v2.*v3"):
        place_of_dataset("owner/name@v2", "v3")
    for bad in ("", ":", ":en", "a:b:c:d:e", "x:b:c:d", "owner/name,en,test"):
        with pytest.raises(UserError, match="ID:CONFIG:SPLIT"):
            place_of_dataset(bad)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of two splits, as it lies on the Hub."""
    pytest.importorskip("datasets")
    write(tmp_path / "data" / "train.jsonl", *({"text": f"train {number}", "more": number} for number in range(3)))
    write(tmp_path / "data" / "test.jsonl", *({"text": f"test {number}", "more": number} for number in range(3)))
    return tmp_path / "data"


def test_a_folder_is_a_dataset(folder: Path) -> None:
    assert contents(read_dataset(str(folder))) == ["test 0", "test 1", "test 2"]
    assert contents(islice(read_dataset(f"{folder}::train"), 2)) == ["train 0", "train 1"]
    assert [text.name for text in read_dataset(f"{folder}:default:test")][-1] == f"{folder}:test:3"
    with pytest.raises(UserError, match="'validation'"):
        list(read_dataset(f"{folder}::validation"))
    with pytest.raises(UserError, match="configuration 'en'"):
        list(read_dataset(f"{folder}:en"))


def test_a_broken_folder_names_the_row_before(folder: Path) -> None:
    (folder / "test.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match="cannot"):
        list(read_dataset(str(folder)))


def test_a_file_is_no_dataset(folder: Path) -> None:
    with pytest.raises(UserError, match="is a file"):
        list(read_dataset(str(folder / "test.jsonl")))


def test_a_dataset_without_texts_says_what_it_has(folder: Path) -> None:
    (folder / "train.jsonl").unlink()
    write(folder / "test.jsonl", {"body": "a", "number": 3})
    with pytest.raises(UserError, match=r"row 1.*'context'.*'text'.*body"):
        list(read_dataset(str(folder)))


def test_without_network_one_hears_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[Any] = []

    def refuse(*address: Any, **__: Any) -> Any:
        addresses.append(address)
        raise OSError("no network")

    from hf_paged_eviction_eval import hub

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(UserError, match=r"reach.*local"):
        list(read_dataset("no/such:en"))
    assert len(addresses) == 1  # and not again and again
