"""The metrics as `evaluate.Metric`: made directly, without the Hub and without a file.

>>> from hf_paged_eviction_eval.metrics.evaluate_metrics import QaF1
>>> QaF1().compute(predictions=["in Paris"], references=[{"answers": ["Paris", "Lutetia"]}])
{'qa_f1': 0.6666666666666666}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate

from .score import METRICS, score_sample

_INPUTS = """
Args:
    predictions: texts, scored whole.
    references: per prediction `{"answers": [text, ...]}`, for classification also `"all_classes": [name, ...]`; more is
        passed over.
    edit_similarity: who compares lines of code, "difflib" or "rapidfuzz".
    rouge: who computes ROUGE-L, "official" or "rouge_score".

Returns:
    The mean over the predictions, 0 to 1, under the name of the metric.
"""


class SampleMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """The mean of `score_sample`; a subclass names the metric.

    Args:
        options: as for `evaluate.Metric`. Predictions are kept in memory, unless several processes gather theirs
            (`num_process`) or `keep_in_memory=False` says otherwise.
    """

    metric: str

    def __init__(self, **options: Any) -> None:
        options.setdefault("keep_in_memory", options.get("num_process", 1) == 1)
        super().__init__(**options)

    def _info(self) -> Any:
        texts = datasets.Sequence(datasets.Value("string"))
        references = {"answers": texts, "all_classes": texts}
        return evaluate.MetricInfo(
            description=f"The metric {self.metric} of {self.__module__.rpartition('.')[0]}.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string"), "references": references}),
        )

    def add(self, *, prediction: Any = None, reference: Any = None, **named: Any) -> None:
        """Add one prediction and its reference."""
        one = {"predictions": prediction, "references": reference, **named}  # `evaluate.combine` names them so
        self.add_batch(**{name: [value] for name, value in one.items()})

    def add_batch(self, *, predictions: Any = None, references: Any = None, **unknown: Any) -> None:
        """Add predictions and their references."""
        # `evaluate` wants the same keys in every reference, no more and no fewer.
        references = [_reference(item) for item in references or ()]
        super().add_batch(predictions=predictions, references=references, **unknown)

    def _build_data_dir(self) -> str:
        # `evaluate` makes a folder below HF_HOME, which may be read-only, even if nothing is going to be stored there.
        return "" if self.keep_in_memory else str(super()._build_data_dir())

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[dict[str, list[str] | None]],
        edit_similarity: str = "difflib",
        rouge: str = "official",
    ) -> dict[str, float]:
        if not predictions:
            raise ValueError(f"{self.metric}: there are no predictions")
        scores = [
            score_sample(
                self.metric,
                prediction,
                reference["answers"] or [],
                reference["all_classes"],
                edit_similarity=edit_similarity,
                rouge=rouge,
            )
            for prediction, reference in zip(predictions, references, strict=True)
        ]
        return {self.metric: sum(scores) / len(scores)}


def _reference(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping) or "answers" not in item:
        raise ValueError(f'a reference is {{"answers": [text, ...]}}, not {item!r:.80}')
    return {"answers": item["answers"], "all_classes": item.get("all_classes")}


#: Names that are not those of the metric, in capitals.
_NAMES = {"longeval": "LongEval"}

# One class of each metric: `QaF1` of `qa_f1`, and so on. A name of the module, so that processes can send it.
for _metric in METRICS:
    _name = _NAMES.get(_metric) or "".join(word.capitalize() for word in _metric.split("_"))
    globals()[_name] = type(_name, (SampleMetric,), {"metric": _metric, "__module__": __name__})


def __getattr__(name: str) -> type[SampleMetric]:
    """Says what kind of names are made here."""
    raise AttributeError(f"no metric is called {name}")
