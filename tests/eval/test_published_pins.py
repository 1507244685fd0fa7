"""Which commit of the Hub a published suite is read from."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_paged_eviction_eval.data import file_task
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.tasks.suites import PUBLISHED


def test_every_suite_on_the_hub_is_pinned() -> None:
    hubs = {suite.hub for suite in PUBLISHED.values() if suite.hub is not None}
    assert len(hubs) == 4
    assert all(re.fullmatch(r"[0-9a-f]{40}", hub.revision) for hub in hubs)


@pytest.mark.parametrize(("revision_given", "name"), [(None, "math500"), ("a1b2", "math500"), (None, "aime2025")])
def test_the_commit_is_asked_for(
    revision_given: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, str]] = []

    def download(repositories: Sequence[str], filename: str, revision: str) -> Path:
        requested.append((filename, revision))
        path = tmp_path / filename
        path.write_text(json.dumps({"problem": "a", "question": "a", "answer": "1"}) + "\n", "utf-8")
        return path

    monkeypatch.setattr(file_task, "download", download)
    settings = TaskSettings(policies=("recency",), budgets=("64",), tasks=(name,), dataset_revision=revision_given)
    hub = PUBLISHED[name].hub
    assert hub is not None
    assert len(PUBLISHED[name].samples(settings)) == len(hub.files)
    assert requested == [(filename, revision_given or hub.revision) for filename in hub.files]
