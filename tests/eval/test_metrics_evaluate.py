"""The metrics as `evaluate.Metric`: offline, without a writable home."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate", reason="the extra `eval` is not installed")

import evaluate

from hf_paged_eviction_eval.metrics import METRICS, evaluate_metrics
from hf_paged_eviction_eval.metrics.evaluate_metrics import Classification, CodeSim, Count, QaF1, Rouge, SampleMetric


def test_every_metric_has_a_class() -> None:
    classes = SampleMetric.__subclasses__()
    assert sorted(metric_class.metric for metric_class in classes) == sorted(METRICS)
    assert all(vars(evaluate_metrics)[metric_class.__name__] is metric_class for metric_class in classes)


def test_mean_of_the_best_answers() -> None:
    references = [{"answers": ["Lutetia", "Paris"]}, {"answers": ["Rome"], "all_classes": None, "length": 3}]
    assert QaF1().compute(predictions=["Paris", "Oslo"], references=references) == {"qa_f1": 0.5}


def test_classes_come_with_the_reference() -> None:
    references = [{"answers": ["A"], "all_classes": ["A", "B"]}, {"answers": ["C"], "all_classes": ["C", "D"]}]
    assert Classification().compute(predictions=["A or B", "C, not A"], references=references) == {
        "classification": 0.75
    }


def test_one_after_the_other_and_in_batches() -> None:
    metric = Count()
    metric.add(prediction="3 of 10", reference={"answers": ["3"]})
    metric.add_batch(predictions=["4", "5"], references=[{"answers": ["4"]}, {"answers": ["6"]}])
    assert metric.compute() == {"count": 0.5}
    assert metric.compute(predictions=["1"], references=[{"answers": ["1"]}]) == {"count": 1.0}


def test_combined() -> None:
    both = evaluate.combine([QaF1(), Rouge(), CodeSim()])
    references = [{"answers": ["x y"]}]
    expected = {"qa_f1": 1.0, "rouge": pytest.approx(1.0), "code_sim": 1.0}
    assert both.compute(predictions=["x y"], references=references) == expected
    both.add(prediction="x y", reference=references[0])
    assert both.compute() == expected


def test_backends_reach_the_function() -> None:
    with pytest.raises(ValueError, match="unknown rouge 'mine'"):
        Rouge().compute(predictions=["x"], references=[{"answers": ["x"]}], rouge="mine")
    with pytest.raises(ValueError, match="unknown edit_similarity 'mine'"):
        CodeSim().compute(predictions=["x"], references=[{"answers": ["x"]}], edit_similarity="mine")


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["x"], [["x"]], "a reference is"),
        (["x"], [{"answer": ["x"]}], "a reference is"),
        (["x"], [{"answers": "x"}], "Got a string"),
        (["x"], [{"answers": []}], "answers is empty"),
        (["x", "y"], [{"answers": ["x"]}], "Mismatch"),
        ([None], [{"answers": ["x"]}], "expected format"),
        ([], [], "no predictions"),
    ],
)
def test_wrong_input(predictions: list[Any], references: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QaF1().compute(predictions=predictions, references=references)


def test_copies() -> None:
    metric = pickle.loads(pickle.dumps(QaF1()))
    assert metric.compute(predictions=["x"], references=[{"answers": ["x"]}]) == {"qa_f1": 1.0}


def test_files_where_they_are_asked_for(tmp_path: Path) -> None:
    metric = QaF1(keep_in_memory=False, cache_dir=str(tmp_path))
    metric.add(prediction="x", reference={"answers": ["x"]})
    assert list(tmp_path.rglob("*.arrow"))
    assert metric.compute() == {"qa_f1": 1.0}


OFFLINE = """
import socket
def refuse(*arguments, **options):
    raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = refuse
from hf_paged_eviction_eval.metrics.evaluate_metrics import QaF1
print(QaF1().compute(predictions=["Paris"], references=[{"answers": ["Paris"]}]))
"""


def test_neither_network_nor_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = {"HF_HOME": str(tmp_path / "file" / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=os.environ | home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'qa_f1': 1.0}"
