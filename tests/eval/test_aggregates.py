"""Official aggregates against numbers worked out by hand."""

import numpy as np
import pytest
from pandas import DataFrame

from hf_paged_eviction_eval.data.longbench.tasks import PRESETS, TASKS
from hf_paged_eviction_eval.report.longbench import aggregates, bucket, official, parts, task_score
from hf_paged_eviction_eval.report.means import Mean

MACRO_ALL, MACRO_EN, PLAIN_EN = (
    "LongBench, macro mean of the 6 categories, 21 tasks",
    "LongBench, macro mean of the 6 categories, 16 English and code tasks",
    "LongBench, plain mean of the 16 English and code tasks",
)


def test_buckets_begin_where_the_official_ones_do() -> None:
    assert [bucket(length) for length in (0, 3999, 4000, 7999, 8000, 10**6)] == [
        "0-4k",
        "0-4k",
        "4-8k",
        "4-8k",
        "8k+",
        "8k+",
    ]


def numbers(task: str, answers: list[tuple[float | None, dict[str, str] | None, float]]) -> dict[str, float]:
    frame = DataFrame(answers, columns=["record_length", "metadata", "score"]).assign(task=task)
    return {part: mean.value for part, mean in official(parts(frame), ["part"]).items()}


def test_an_empty_bucket_has_no_number() -> None:
    answers = [(100, None, 1.0), (200, None, 0.0), (9000, None, 0.125), (None, None, 1.0)]
    assert numbers("qasper_e", answers) == {"0-4k": 50.0, "8k+": 12.5}
    assert numbers("qasper_e", []) == {}
    assert numbers("qasper", answers) == {"": 53.12}


def test_buckets_are_rounded_as_numpy_rounds_and_tasks_as_a_loop_does() -> None:
    """Of these scores, the sum in a loop and the sum in pairs lie on two sides of a tie."""
    scores = [0.1, 0.0, 0.35, 0.15, 0.45, 0.3, 0.05, 0.15]
    assert round(100 * float(np.mean(scores)), 2) != task_score(scores)
    answers = [(100, None, score) for score in scores]
    assert numbers("qasper_e", answers) == {"0-4k": round(100 * float(np.mean(scores)), 2)}
    assert numbers("qasper", answers) == {"": task_score(scores)}


def values(scores: dict[str, float]) -> dict[str, float | None]:
    every = aggregates({task: Mean(score) for task, score in scores.items()})
    return {one.name: one.mean and one.mean.value for one in every}


def test_aggregates_of_all_tasks() -> None:
    # Every task scores the number of its place, so that means by category and by task differ.
    by_name = values({task: float(place) for place, task in enumerate(PRESETS["all21"])} | {"passkey": 99.0})
    # By category: (0+1+2+3)/4, (4+5+6+7)/4, (8+..+11)/4, (12+..+15)/4, (16+17+18)/3, (19+20)/2.
    assert by_name[MACRO_ALL] == round((1.5 + 5.5 + 9.5 + 13.5 + 17 + 19.5) / 6, 2)
    # Without the Chinese tasks 3, 7, 11, 15, 18.
    assert by_name[MACRO_EN] == round((1 + 5 + 9 + 13 + 16.5 + 19.5) / 6, 2)
    assert by_name[PLAIN_EN] == round((sum(range(21)) - 3 - 7 - 11 - 15 - 18) / 16, 2) == 9.75


def test_aggregates_without_a_task_say_which_one() -> None:
    scores = dict.fromkeys(PRESETS["en16"], Mean(50.0))
    every = {one.name: one for one in aggregates(scores)}
    assert every[PLAIN_EN].mean == every[MACRO_EN].mean == Mean(50.0) and every[MACRO_ALL].mean is None
    assert every[MACRO_ALL].missing == ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
    del scores["lcc"]
    assert {one.name: one for one in aggregates(scores)}[PLAIN_EN] == (PLAIN_EN, None, ("lcc",))
    assert [len(one.missing) for one in aggregates({})] == [21, 16, 16]


def test_the_macro_mean_reproduces_the_official_readme() -> None:
    # ChatGLM3-6B-32k, English: 48.5 out of the means of its categories.
    means = {"single_doc_qa": 40.3, "multi_doc_qa": 46.6, "summarization": 29.5, "few_shot": 68.1, "synthetic": 50.5}
    scores = {task: means.get(TASKS[task].category, 56.2) for task in PRESETS["en16"]}
    assert values(scores)[MACRO_EN] == pytest.approx(48.5, abs=0.05)
