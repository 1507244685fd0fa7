"""The 13 tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654), from files that its own scripts generated.

RULER publishes a generator: `scripts/data/prepare.py` of https://github.com/NVIDIA/RULER writes
`TASK/validation.jsonl`, sized by the tokenizer of a model. Such a folder is read here as it is. A prompt is the
record's `input` followed by its `answer_prefix`. If the tokenizer has a chat template, the model's turn begins with
the prefix, as in RULER's own templates. Answers have the official lengths and are scored as officially. The
group `ruler`, which needs no files, imitates these tasks with texts that ship with Python; its scores are not
comparable with published ones.
"""

from __future__ import annotations

from functools import partial

from typing_extensions import NotRequired, TypedDict

from .file_task import FileTask
from .records import COUNT, TEXT, TEXTS, Record
from .sample import Sample

#: Kind of task -> most tokens of an answer, the metric, and where in `input` the question begins.
_KINDS = {
    "niah": (128, "string_match_all", "\nWhat "),
    "vt": (30, "string_match_all", "\nQuestion: "),
    "cwe": (120, "string_match_all", "\nQuestion: "),
    "fwe": (50, "string_match_all", "\nQuestion: "),
    "qa": (32, "string_match_part", "\n\nAnswer the question based on the given documents."),
}
_NAMES = (
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
    "niah_multiquery vt cwe fwe qa_1 qa_2"
).split()


class _Columns(TypedDict):
    index: COUNT
    input: TEXT
    outputs: TEXTS
    answer_prefix: NotRequired[TEXT]
    length: NotRequired[COUNT]


def _convert(name: str, record: Record, index: int, where: str) -> Sample:
    tokens, metric, begins = _KINDS[name.partition("_")[0]]
    text = record["input"]
    at = max(text.rfind(begins), 0)
    return Sample(
        id=f"ruler_data_{name}/{record['index']}",
        task=f"ruler_data_{name}",
        context=text[:at],
        question=text[at:],
        cue=record.get("answer_prefix", ""),
        chat=True,
        answers=tuple(record["outputs"]),
        max_new_tokens=tokens,
        metadata={"length": record["length"]} if "length" in record else {},
        metric=metric,
    )


TASKS = tuple(
    FileTask(
        name=f"ruler_data_{name}",
        description=f"RULER, {name}: records made by its own scripts.",
        files=(f"{name}/validation.jsonl", f"{name}.jsonl"),
        without="make them with scripts/data/prepare.py of https://github.com/NVIDIA/RULER for the tokenizer of your "
        "model and a length, and give --data-dir the folder that holds TASK/validation.jsonl",
        columns=_Columns,
        convert=partial(_convert, name),
    )
    for name in _NAMES
)
