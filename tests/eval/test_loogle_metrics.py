"""The metrics of LooGLE's `automatic_sim`: BLEU, METEOR, ROUGE and BERTScore."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_paged_eviction_eval.data.longbench import hub
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.metrics import loogle, score_sample
from hf_paged_eviction_eval.store.scoring import run_score, score_files

#: Scores of the official `automatic_metrics.py`, METEOR's with WordNet 3.0 and with words in the order of the text.
VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/loogle_texts.json").read_text("utf-8"))


@pytest.fixture
def wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK's METEOR with a WordNet that knows one pair of synonyms (the real one has to be downloaded)."""
    library = pytest.importorskip("nltk.translate.meteor_score")

    def synsets(word: str) -> list[Any]:
        lemma = SimpleNamespace(name=lambda: "lake")
        return [SimpleNamespace(lemmas=lambda: [lemma])] if word == "pond" else []

    patched = partial(library.single_meteor_score, wordnet=SimpleNamespace(synsets=synsets))
    monkeypatch.setattr(library, "single_meteor_score", patched)


@pytest.mark.usefixtures("wordnet")
@pytest.mark.parametrize("metric", sorted({case["metric"] for case in VECTORS}))
def test_scores_of_the_official_script(metric: str) -> None:
    pytest.importorskip("nltk")
    cases = [case for case in VECTORS if case["metric"] == metric]
    assert len(cases) >= 7
    for case in cases:
        assert score_sample(metric, case["prediction"], case["answers"]) == case["score"], case


@pytest.mark.usefixtures("wordnet")
def test_meteor_knows_synonyms_and_does_not_change() -> None:
    assert score_sample("meteor", "a pond", ["a lake"]) == score_sample("meteor", "a lake", ["a lake"])
    assert score_sample("meteor", "a pond", ["a house"]) < 0.6
    # Repeated words count once.
    assert score_sample("meteor", "a a lake lake", ["a lake"]) == score_sample("meteor", "a lake", ["a lake"])


def test_rouge_of_the_package() -> None:
    package = pytest.importorskip("rouge")
    texts = ["a b. c d e", "a a a b", "x . y", "d. e. f", "a", "The end. The end. A b c"]
    for said in texts:
        for wanted in texts:
            found = package.Rouge().get_scores(said, wanted)[0]
            for n in (1, 2):
                assert score_sample(f"rouge_{n}_recall", said, [wanted]) == found[f"rouge-{n}"]["r"]


def test_without_wordnet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = pytest.importorskip("nltk.translate.meteor_score")

    def missing(*texts: Any) -> float:
        raise LookupError("Resource wordnet not found.")

    monkeypatch.setattr(library, "single_meteor_score", missing)
    with pytest.raises(UserError, match=r"need WordNet, .*python -m nltk.downloader wordnet, or .*NLTK_DATA"):
        score_sample("meteor", "a", ["b"])


@pytest.fixture
def bert_score(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A package that gives the recall 0.5, and what it was handed."""
    seen: list[Any] = []

    class BERTScorer:
        def __init__(self, **how: str) -> None:
            seen.append(how)

        def score(self, candidates: list[str], references: list[str]) -> tuple[float, float, float]:
            seen.append((candidates, references))
            return 0.25, 0.5 if candidates != references else 1.0000002, 0.3

    package = ModuleType("bert_score")
    package.BERTScorer = BERTScorer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bert_score", package)
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    loogle._scorer.cache_clear()
    return seen


def test_bert_score_hands_texts_over_as_officially(bert_score: list[Any]) -> None:
    assert score_sample("bert_score", "said", ["wanted"]) == 0.5
    assert score_sample("bert_score", "", ["wanted"]) == 0.5
    assert score_sample("bert_score", "same", ["same"]) == 1
    assert score_sample("bert_score", " \n", ["wanted"]) == 0
    assert bert_score == [
        {"lang": "en"},
        (["wanted"], ["said"]),
        (["wanted"], ["None"]),
        (["same"], ["same"]),
    ]


def test_bert_score_without_its_model(bert_score: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(**how: str) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your connection")

    monkeypatch.setattr(sys.modules["bert_score"], "BERTScorer", absent)
    with pytest.raises(UserError, match=r"need a model: We couldn't connect to .*; bring the model roberta-large"):
        score_sample("bert_score", "said", ["wanted"])
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "reachable", lambda url: False)
    with pytest.raises(UserError, match=r"is out of reach; bring the model roberta-large into the cache"):
        score_sample("bert_score", "said", ["wanted"])


@pytest.mark.parametrize(
    ("metric", "package", "extra"), [("bleu_1", "nltk", "metrics"), ("bert_score", "bert_score", "bertscore")]
)
def test_packages_that_are_missing(metric: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *more: Any) -> ModuleType:
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    loogle._scorer.cache_clear()
    with pytest.raises(UserError, match=rf"pip install 'hf_paged_eviction\[{extra}\]'"):
        score_sample(metric, "said", ["wanted"])


def test_answers_are_scored_by_other_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "task": "loogle_shortdep_qa",
        "length": None,
        "policy": "recency",
        "budget": "64",
        "id": "loogle_shortdep_qa/0",
        "prediction": "a b c",
        "answers": ["a b x y"],
        "metric": "rouge_l_recall",
        "score": 0.5,
        "metadata": {},
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    asked = ["rouge_1_recall", "rouge_2_recall"]
    found = score_files([tmp_path], metrics=asked)
    assert [(each.metric, each.score, each.recorded, each.differing) for each in found] == [
        ("rouge_1_recall", 50.0, None, 0),
        ("rouge_2_recall", 33.33, None, 0),
    ]
    assert [(each.metric, each.recorded) for each in score_files([tmp_path])] == [("rouge_l_recall", 50.0)]
    assert run_score([tmp_path], False, "difflib", "official", None, metrics=asked)
    assert "rouge_2_recall" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"unknown metric 'bleu' \(--metric\); choose from qa_f1, .*bleu_4"):
        run_score([tmp_path], False, "difflib", "official", None, metrics=["bleu"])
