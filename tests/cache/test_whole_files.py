"""Files are written whole or not at all, to regular files only, and nothing stays behind."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.naming.files import whole_file


def fed() -> PagedEvictionCache:
    model = models.shared("llama")
    cache = models.paged(model.config, budget=24, block_size=4, policy="keydiff")
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    return cache


def write(path: Path, content: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(content)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, "before")
    with pytest.raises(RuntimeError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, target = tmp_path / "link", tmp_path / "folder" / "target"
    path.symlink_to(target)
    for content in ("new", "again"):
        write(path, content)
        assert path.is_symlink() and target.read_text() == content


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_is_neither_replaced_nor_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"pipe.*regular file"):
        fed().save(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    with pytest.raises(ValueError, match=r"pipe.*regular file"):
        PagedEvictionCache.load(path, models.shared("llama").config)


def test_messages_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = models.shared("llama").config
    with pytest.raises(OSError, match=r"Cannot write 'no/such/x'.*no folder"):
        fed().save("no/such/x")
    with pytest.raises(OSError, match=r"folder, not a file"):
        fed().save(tmp_path)
    with pytest.raises(ValueError, match=r"folder, not a file"):
        PagedEvictionCache.load(tmp_path, config)
    with pytest.raises(OSError, match="too long"):
        fed().save("x" * 300)
    with pytest.raises(OSError, match=r"no saved context|too long"):
        PagedEvictionCache.load("x" * 300, config)
    fed().save("x" * 250)
    assert os.listdir(tmp_path) == ["x" * 250]


@pytest.mark.skipif(sys.platform == "win32", reason="what is left there stays")
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    code = (
        "import os, signal, sys\nfrom hf_paged_eviction.naming.files import whole_file\n"
        "with whole_file(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert len(os.listdir(tmp_path)) == 1
    (tmp_path / ".a.other.abc.tmp").write_text("of the file a.other")
    with whole_file(path) as living:
        living.write_text("first")
        write(path, "second")
        assert path.read_text() == "second" and living.exists()
    assert path.read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == [".a.other.abc.tmp", "a"]
