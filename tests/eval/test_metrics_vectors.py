"""Official scores of 1,115 predictions, where the shared data lies beside the repository."""

import json
from pathlib import Path

import pytest

from hf_paged_eviction_eval.metrics import score_sample

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "longbench" / "metric_vectors.jsonl"
NAMES = ("qa_f1", "qa_f1_zh", "rouge", "rouge_zh", "classification", "count", "retrieval", "retrieval_zh", "code_sim")


@pytest.mark.skipif(not VECTORS.exists(), reason="no shared data beside the repository")
@pytest.mark.parametrize("metric", NAMES)
def test_official_scores(metric: str) -> None:
    if metric in ("qa_f1_zh", "rouge_zh"):
        pytest.importorskip("jieba")
    with VECTORS.open(encoding="utf-8") as file:
        cases = [case for case in map(json.loads, file) if case["metric"] == metric]
    assert len(cases) >= 60
    for case in cases:
        score = score_sample(metric, case["prediction"], case["answers"], case["all_classes"])
        assert score == pytest.approx(case["score"], abs=1e-9), case


@pytest.mark.skipif(not VECTORS.exists(), reason="no shared data beside the repository")
def test_no_metric_is_left_out() -> None:
    with VECTORS.open(encoding="utf-8") as file:
        assert {json.loads(line)["metric"] for line in file} == set(NAMES)
