"""The Hub: a pinned file from a server that is up, and a quick word where there is none."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asking import asked
from hf_paged_eviction_eval import hub
from hf_paged_eviction_eval.data.file_task import FileTask
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.data.task_files import read_task
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import TaskFileOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.tasks.suites import PUBLISHED
from longbench_files import longbench_record, write_longbench, write_longbench_zip, write_records
from processes import reserved_port

REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


def load_samples(task: str, settings: TaskSettings) -> list[Sample]:
    return PUBLISHED[task].samples(settings)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No network, no proxy, nothing in the cache."""
    from huggingface_hub import constants

    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with reserved_port() as port:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        yield tmp_path / "cache"


@pytest.mark.parametrize("task", ["qasper", "longbench_v2"])
def test_no_network_is_said_at_once(task: str, no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("would try for 23 s"))
    with pytest.raises(UserError, match="--data-dir"):
        load_samples(task, asked())


def test_names_that_nobody_answers_for_take_no_longer(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    enough, waited = threading.Event(), []

    def hang(*_: object, **__: object) -> None:
        waited.append(enough.wait(300))
        raise OSError("nobody answers")

    monkeypatch.setattr(hub.socket, "create_connection", hang)
    assert not hub.reachable("https://huggingface.co")
    assert not waited  # it still waits
    enough.set()


@pytest.mark.parametrize("url", ["http://", "nonsense", "http://\udcff/", "http://" + "a" * 300 + ".example"])
def test_odd_addresses_are_out_of_reach(url: str, no_cache: Path) -> None:
    assert not hub.reachable(url)


def test_a_proxy_is_asked_instead_but_for_other_hosts(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    with reserved_port() as port:
        assert not hub.reachable(f"https://127.0.0.1:{port}")
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: pytest.fail("must not be probed"))
    assert hub.reachable("https://huggingface.co")


def test_offline_mode_does_not_ask(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "reachable", lambda _: pytest.fail("must not be asked"))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        load_samples("qasper", asked())


def test_the_cache_needs_no_network(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under either name of the organisation."""
    folder = no_cache / "datasets--THUDM--LongBench" / "snapshots" / REVISION
    folder.mkdir(parents=True)
    write_longbench_zip(folder / "data.zip", ["qasper"])
    monkeypatch.setattr(hub, "reachable", lambda _: pytest.fail("must not be asked"))
    assert [sample.id for sample in load_samples("qasper", asked(limit=2))] == ["qasper-0000", "qasper-0001"]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a download needs: one file of one repository."""

    path_served = f"/datasets/THUDM/LongBench/resolve/{REVISION}/data.zip"
    content = b""
    requested: list[str]

    def do_HEAD(self) -> None:
        self.requested.append(self.path)
        exists = self.path == self.path_served
        self.send_response(200 if exists else 404)
        if exists:
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", REVISION)
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(self.content) if exists else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path == self.path_served:
            self.wfile.write(self.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    Hub.content = write_longbench_zip(tmp_path / "served.zip", ["qasper"]).read_bytes()
    Hub.requested = []
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


def test_the_archive_is_fetched_at_the_pinned_revision(server: str, tmp_path: Path) -> None:
    """In a process of its own: the address of the Hub is read when its client is imported."""
    code = (
        "from hf_paged_eviction_eval import hub\n"
        "from hf_paged_eviction_eval.options.settings import TaskSettings\n"
        "from hf_paged_eviction_eval.tasks.suites import load_samples\n"
        "hub._CONNECT_SECONDS = hub._PROBE_SECONDS = 300\n"
        "settings = TaskSettings(policies=(), budgets=('full',), tasks=('qasper',))\n"
        "print([sample.id for sample in load_samples('qasper', settings, None, None)])\n"
    )
    left_out = {*PROXIES, "HF_HUB_OFFLINE", "HF_HUB_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("['qasper-0000', 'qasper-0001', 'qasper-0002']")
    wanted = [path for path in Hub.requested if path.startswith("/datasets/")]
    assert wanted[0] == f"/datasets/zai-org/LongBench/resolve/{REVISION}/data.zip"
    assert Hub.path_served in wanted


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with two tasks, loaded from a folder as it would be from the Hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = write_longbench(tmp_path / "named", ["qasper", "trec"])
    card = ["---", "configs:"]
    for task in ("qasper", "trec", "odd"):
        card += [f"- config_name: {task}", "  data_files:", "  - split: test", f"    path: {task}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), "utf-8")
    odd = {"context": "", "question": "", "answer_prefix": "", "answers": ["a"], "all_classes": None, "length": 1}
    write_records(folder / "odd.jsonl", [odd])
    return folder


def own(dataset: Path | str, config: str) -> FileTask:
    """A task of the user's: a dataset with LongBench's columns."""
    return read_task(Path(f"datasets:{dataset}:{config}"), TaskFileOptions(template="{{ context }}|||{{ input }}"))


def test_a_dataset_of_your_own(dataset: Path) -> None:
    for config in ("qasper", "trec"):
        task = own(dataset, config)
        records = [json.loads(line) for line in (dataset / f"{config}.jsonl").read_text("utf-8").splitlines()]
        assert [sample.context for sample in task.samples(asked())] == [record["context"] for record in records]
        assert len(task.digests(asked())["data"]) == 64


def test_datasets_that_do_not_fit(dataset: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)configuration 'hotpotqa'.*qasper"):
        own(dataset, "hotpotqa").samples(asked())
    with pytest.raises(UserError, match=r"odd, row 1.*'input' is undefined"):
        own(dataset, "odd").samples(asked())


def test_a_named_dataset_may_be_in_the_cache(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rows = datasets.Dataset.from_list([longbench_record("qasper", 0)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(test=rows))
    assert len(own("some/where", "any").samples(asked())) == 1
