"""Published predictions give the published scores, where the files are at hand.

`LONGBENCH_PREDICTIONS` names the folder `LongBench` of a checkout of the official repository, or of one that keeps its
`pred/` and `pred_e/` trees: a folder per model, with a file per task and the `result.json` of the official `eval.py`.
The files are nobody's to ship, so without the folder these tests are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.data.longbench import TASKS
from hf_paged_eviction_eval.report.scoring import score_files

VARIABLE = "LONGBENCH_PREDICTIONS"
#: Of the 13 published files of llama2-7b-chat-4k, three hold several runs.
SEVERAL_RUNS = 3
TASKS_OF_E = sum(task.is_e for task in TASKS.values())


def published() -> list[Path]:
    """Folders of predictions of the 13 tasks of LongBench-E, or more, with official scores beside them."""
    if not (named := os.environ.get(VARIABLE)):
        return []
    files = sorted(Path(named).expanduser().glob("pred*/*/result.json"))
    assert files, f"{VARIABLE}={named}: no pred/MODEL/result.json and no pred_e/MODEL/result.json"
    return [file.parent for file in files if len(list(file.parent.glob("*.jsonl"))) >= TASKS_OF_E]


MODELS = published()


def scores(folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Official numbers, ours, and how many files held several runs."""
    # The official script writes NaN for a bucket without samples.
    official = json.loads((folder / "result.json").read_text("utf-8"), parse_constant=lambda word: None)
    # `pred.py` wrote some files twice: the first run of each is the one that the official numbers are of.
    task_scores = score_files([folder], keep_first_run=True)
    is_e = folder.parent.name == "pred_e"
    ours = {entry.task.removesuffix("_e"): entry.groups if is_e else entry.score for entry in task_scores}
    return official, ours, sum(entry.left_out > 0 for entry in task_scores)


@pytest.mark.skipif(not MODELS, reason=f"{VARIABLE} names no folder with LongBench's pred/ or pred_e/ and its results")
@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_published_predictions_give_the_published_scores(folder: Path) -> None:
    if any((folder / f"{task.base}.jsonl").exists() for task in TASKS.values() if task.language == "zh"):
        pytest.importorskip("jieba")
    official, ours, left_out = scores(folder)
    assert set(official) <= set(ours), "a task was not scored"
    wrong = {task: (ours[task], score) for task, score in official.items() if ours[task] != score}
    assert not wrong, f"{len(wrong)} of {len(official)} tasks have other scores"
    if folder.name == "llama2-7b-chat-4k" and folder.parent.name == "pred_e":
        numbers = [number for groups in ours.values() for number in groups.values()]
        assert (len(ours), len(numbers), left_out) == (13, 39, SEVERAL_RUNS)
        assert all(isinstance(number, float) for number in numbers)
