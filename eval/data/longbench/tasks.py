"""The tasks of LongBench (Bai et al. 2023, arXiv 2308.14508) and LongBench-E: what is asked, and how it is scored.

Prompts and answer lengths are the official tables, shipped unchanged next to this module (see NOTICE).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent
PROMPT_FILE = FOLDER / "dataset2prompt.json"
LENGTH_FILE = FOLDER / "dataset2maxlen.json"

PROMPTS: dict[str, str] = json.loads(PROMPT_FILE.read_text("utf-8"))
_ANSWER_TOKENS: dict[str, int] = json.loads(LENGTH_FILE.read_text("utf-8"))

#: The six official categories, whose means are averaged to the official score.
CATEGORIES = ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")


@dataclass(frozen=True)
class LongBenchTask:
    """One task.

    Attributes:
        name: its official name; those of LongBench-E end in `_e`.
        category: one of `CATEGORIES`.
        language: `en`, `zh` or `code`.
        metric: name of the metric, see `metrics.score_sample`.
        max_new_tokens: most tokens of an answer.
        chat: the prompt is wrapped in the chat template.
        first_line: only the first line of an answer is scored.
        stop_at_newline: a newline ends the answer.
        samples: records in the official file.
        base: the task whose prompt and rules it has: itself, but for those of LongBench-E.
    """

    name: str
    category: str
    language: str
    metric: str
    max_new_tokens: int
    chat: bool
    first_line: bool
    stop_at_newline: bool
    samples: int
    base: str

    @property
    def prompt(self) -> str:
        """The official template, to be filled by `str.format(**record)`."""
        return PROMPTS[self.base]

    @property
    def is_e(self) -> bool:
        """Whether it belongs to LongBench-E, reported by length."""
        return self.name != self.base

    @property
    def description(self) -> str:
        """A line for the list of tasks."""
        suite = "LongBench-E, by length" if self.is_e else "LongBench"
        return f"{suite}: {self.category.replace('_', ' ')} ({self.language}), {self.samples} records, {self.metric}."


_TABLE = """
    narrativeqa           single_doc_qa  en    qa_f1           200
    qasper                single_doc_qa  en    qa_f1           200  224
    multifieldqa_en       single_doc_qa  en    qa_f1           150  150
    multifieldqa_zh       single_doc_qa  zh    qa_f1_zh        200
    hotpotqa              multi_doc_qa   en    qa_f1           200  300
    2wikimqa              multi_doc_qa   en    qa_f1           200  300
    musique               multi_doc_qa   en    qa_f1           200
    dureader              multi_doc_qa   zh    rouge_zh        200
    gov_report            summarization  en    rouge           200  300
    qmsum                 summarization  en    rouge           200
    multi_news            summarization  en    rouge           200  294
    vcsum                 summarization  zh    rouge_zh        200
    trec                  few_shot       en    classification  200  300
    triviaqa              few_shot       en    qa_f1           200  300
    samsum                few_shot       en    rouge           200  300
    lsht                  few_shot       zh    classification  200
    passage_count         synthetic      en    count           200  300
    passage_retrieval_en  synthetic      en    retrieval       200  300
    passage_retrieval_zh  synthetic      zh    retrieval_zh    200
    lcc                   code           code  code_sim        500  300
    repobench-p           code           code  code_sim        500  300
"""


def _tasks() -> dict[str, LongBenchTask]:
    plain: dict[str, LongBenchTask] = {}
    by_length: dict[str, LongBenchTask] = {}
    for line in _TABLE.strip().splitlines():
        name, category, language, metric, samples, *samples_e = line.split()
        task = LongBenchTask(
            name=name,
            category=category,
            language=language,
            metric=metric,
            max_new_tokens=_ANSWER_TOKENS[name],
            # Few-shot and code prompts are texts to be continued, not instructions.
            chat=category not in ("few_shot", "code"),
            first_line=category == "few_shot",
            stop_at_newline=name == "samsum",
            samples=int(samples),
            base=name,
        )
        plain[name] = task
        for count in samples_e:
            by_length[f"{name}_e"] = replace(task, name=f"{name}_e", samples=int(count))
    return plain | by_length


#: All tasks by name: the 21 of LongBench, then the 13 of LongBench-E.
TASKS: dict[str, LongBenchTask] = _tasks()

#: Sets of tasks that papers report.
PRESETS: dict[str, tuple[str, ...]] = {
    "paper": ("hotpotqa", "qasper", "multifieldqa_en", "gov_report", "multi_news"),
    "en16": tuple(name for name, task in TASKS.items() if not task.is_e and task.language != "zh"),
    "all21": tuple(name for name, task in TASKS.items() if not task.is_e),
    "e13": tuple(name for name, task in TASKS.items() if task.is_e),
}
