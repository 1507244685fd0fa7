"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): 503 questions with four choices over long texts.

Two things differ from the official run. It samples at temperature 0.1; here the answer is greedy, as everywhere in
this package. And it fills the placeholders of its prompt one after the other, so that a `$Q$` in a document becomes
the question; here documents stay as they are. The rest is the official `0shot` setting: its prompt, answers of at most
128 tokens, the middle of a long prompt cut out (120,000 tokens are kept there, `--max-length 120000` here), and a
chat.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from ..file_task import FileTask, Hub
from ..records import TEXT, Record, columns_of
from ..sample import Sample
from .official import differences

NAME = "longbench_v2"

#: `prompts/0shot.txt` of the official repository (MIT, see NOTICE).
PROMPT = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""


def to_sample(record: Record, index: int, where: str) -> Sample:
    """The question of a record; blanks around its texts are dropped, as officially."""
    head, tail = PROMPT.split("$DOC$")
    question = ""
    # From left to right, so that a text that has a placeholder in it stays as it is.
    for place, column in [("$Q$", "question"), *((f"$C_{letter}$", f"choice_{letter}") for letter in "ABCD")]:
        before, _, tail = tail.partition(place)
        question += before + record[column].strip()
    return Sample(
        id=record["_id"],
        task=NAME,
        context=head + record["context"].strip(),
        question=question + tail,
        answers=(record["answer"],),
        max_new_tokens=128,
        metadata={name: record[name] for name in ("domain", "sub_domain", "difficulty", "length")},
        metric="multiple_choice",
        chat=True,
    )


TASK = FileTask(
    name=NAME,
    description="LongBench v2: 503 questions with four choices over long texts.",
    files=("longbench_v2.jsonl", "longbench_v2.json", "data.json"),
    hub=Hub(("zai-org/LongBench-v2", "THUDM/LongBench-v2"), ("data.json",), "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"),
    columns=columns_of(
        NAME,
        {
            **dict.fromkeys("_id domain sub_domain question choice_A choice_B choice_C choice_D context".split(), TEXT),
            "difficulty": Literal["easy", "hard"],
            "length": Literal["short", "medium", "long"],
            "answer": Literal["A", "B", "C", "D"],
        },
    ),
    prompt=PROMPT,
    official=partial(differences, NAME, 503, None, ()),
    convert=to_sample,
)
