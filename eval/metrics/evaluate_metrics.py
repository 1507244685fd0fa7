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

from .score import score_sample

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


class QaF1(SampleMetric):
    metric = "qa_f1"


class QaF1Zh(SampleMetric):
    metric = "qa_f1_zh"


class Rouge(SampleMetric):
    metric = "rouge"


class RougeZh(SampleMetric):
    metric = "rouge_zh"


class Classification(SampleMetric):
    metric = "classification"


class Count(SampleMetric):
    metric = "count"


class Retrieval(SampleMetric):
    metric = "retrieval"


class RetrievalZh(SampleMetric):
    metric = "retrieval_zh"


class CodeSim(SampleMetric):
    metric = "code_sim"


class MultipleChoice(SampleMetric):
    metric = "multiple_choice"


class StringMatchAll(SampleMetric):
    metric = "string_match_all"


class StringMatchPart(SampleMetric):
    metric = "string_match_part"


class LongEval(SampleMetric):
    metric = "longeval"


class MathVerify(SampleMetric):
    metric = "math_verify"


class FirstNumber(SampleMetric):
    metric = "first_number"


class WordMatch(SampleMetric):
    metric = "word_match"


class NameMatch(SampleMetric):
    metric = "name_match"


class LastNumber(SampleMetric):
    metric = "last_number"


class NumberFound(SampleMetric):
    metric = "number_found"


class NumbersInOrder(SampleMetric):
    metric = "numbers_in_order"


class LetterOrText(SampleMetric):
    metric = "letter_or_text"


class LetterOrFunction(SampleMetric):
    metric = "letter_or_function"


class CharacterF1Zh(SampleMetric):
    metric = "character_f1_zh"


class RougeLsum(SampleMetric):
    metric = "rouge_lsum"


class RougeLRecall(SampleMetric):
    metric = "rouge_l_recall"


class Rouge1Recall(SampleMetric):
    metric = "rouge_1_recall"


class Rouge2Recall(SampleMetric):
    metric = "rouge_2_recall"


class Bleu1(SampleMetric):
    metric = "bleu_1"


class Bleu4(SampleMetric):
    metric = "bleu_4"


class Meteor(SampleMetric):
    metric = "meteor"


class BertScore(SampleMetric):
    metric = "bert_score"


class AnswerWithin(SampleMetric):
    metric = "answer_within"


class ValueWithin(SampleMetric):
    metric = "value_within"


class Ndcg10(SampleMetric):
    metric = "ndcg_10"


class ClozeExact(SampleMetric):
    metric = "cloze_exact"


class ClozePartial(SampleMetric):
    metric = "cloze_partial"
