"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): 503 questions with four choices over long texts.

What differs from the official run: it asks a server at temperature 0.1, here the answer is greedy, as everywhere in
this package; and it fills the places of its prompt one after the other, so that a `$Q$` in a document becomes the
question, here documents stay as they are. The rest is the official `0shot` setting: its prompt, answers of at most 128
tokens, the middle of a long prompt cut out (120,000 tokens are kept there, `--max-length 120000` here), and a chat.
"""

from __future__ import annotations

from ...tasks import Sample
from .records import TEXT, Kind, Record, one_of

NAME = "longbench_v2"
#: Questions in the official file.
SAMPLES = 503
FILES = ("longbench_v2.jsonl", "longbench_v2.json", "data.json")
REPOSITORIES = ("zai-org/LongBench-v2", "THUDM/LongBench-v2")
HUB_FILE = "data.json"
REVISION = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
MAX_NEW_TOKENS = 128

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

COLUMNS: dict[str, Kind] = {
    "_id": TEXT,
    "domain": TEXT,
    "sub_domain": TEXT,
    "difficulty": one_of("easy", "hard"),
    "length": one_of("short", "medium", "long"),
    "question": TEXT,
    "choice_A": TEXT,
    "choice_B": TEXT,
    "choice_C": TEXT,
    "choice_D": TEXT,
    "answer": one_of("A", "B", "C", "D"),
    "context": TEXT,
}


def to_sample(record: Record) -> Sample:
    """The question of a record; blanks around its texts are dropped, as officially."""
    head, tail = PROMPT.split("$DOC$")
    places = {"$Q$": record["question"]} | {f"$C_{letter}$": record[f"choice_{letter}"] for letter in "ABCD"}
    return Sample(
        id=record["_id"],
        task=NAME,
        context=head + record["context"].strip(),
        question=_fill(tail, {place: text.strip() for place, text in places.items()}),
        answers=(record["answer"],),
        max_new_tokens=MAX_NEW_TOKENS,
        metadata={name: record[name] for name in ("domain", "sub_domain", "difficulty", "length")},
        metric="multiple_choice",
        chat=True,
    )


def _fill(template: str, texts: dict[str, str]) -> str:
    """From left to right, so that a text that has a placeholder in it stays as it is."""
    filled = ""
    for place, text in texts.items():
        before, _, template = template.partition(place)
        filled += before + text
    return filled + template
