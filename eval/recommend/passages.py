"""What is read: windows of texts, or the prompts of a file of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..data.prompting.prompts import encode
from ..data.task_files import TaskFile
from ..data.texts import Text, read_texts
from ..errors import UserError
from ..options.evaluate import TaskFileOptions
from ..options.recommend import RecommendOptions


@dataclass(frozen=True)
class Passage:
    """One thing to read and to go on from.

    Attributes:
        name: in rows.
        context: ids that are read first.
        question: ids that are read on their own after these; empty where all is read at once.
        answer: ids that follow; empty where the full cache is to say them.
        answer_tokens: how many follow, at most.
    """

    name: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    answer_tokens: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.context + self.question

    @property
    def shape(self) -> tuple[int, int, int]:
        """Passages of one shape can be read together."""
        return len(self.context), len(self.question), len(self.answer)

    @property
    def tokens(self) -> int:
        """At most, the answer included."""
        return len(self.context) + len(self.question) + self.answer_tokens

    def forwards(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Where each forward of the prompt begins and ends, `chunk` tokens at most."""
        middle, end = len(self.context), len(self.context) + len(self.question)
        for start in range(0, middle, chunk):
            yield start, min(start + chunk, middle)
        for start in range(middle, end, chunk):
            yield start, min(start + chunk, end)


def digest(passages: Sequence[Passage]) -> str:
    """SHA-256 of all ids."""
    found = sha256()
    for each in passages:
        found.update(repr((each.name, each.context, each.question, each.answer, each.answer_tokens)).encode())
    return found.hexdigest()


def text_passages(texts: Sequence[Text], tokenizer: Any, length: int, answer: int, most: int) -> list[Passage]:
    """Windows of texts in turns, the first of each text first, so that the first few come from all of them.

    What is left of a text at its end is a window of its own if it is half as long as the others or all there is.

    Raises:
        UserError: no text is long enough.
    """
    least = 2 * answer
    if length < least:
        raise UserError(
            f"--length {length} is too short: of {answer} tokens (--answer-tokens) at least {least} are needed"
        )
    opening = list(tokenizer("")["input_ids"])
    opening = opening if opening and opening[-1] != tokenizer.eos_token_id else []
    step = length - len(opening)
    windows: list[list[Passage]] = []
    for text in texts:
        # Enough characters for the tokens wanted, without encoding whole books.
        ids = tokenizer(text.content[: step * most * 32], add_special_tokens=False, verbose=False)["input_ids"]
        found: list[Passage] = []
        for start in range(0, len(ids), step):
            part = (*opening, *ids[start : start + step])
            if len(found) == most or len(part) < (length / 2 if found else least):
                break
            name = f"{text.name}:{start}"
            found.append(Passage(name, part[:-answer], (), part[-answer:], answer))
        windows.append(found)
    passages = [each for turn in zip_longest(*windows) for each in turn if each is not None][:most]
    if not passages:
        raise UserError(f"no text of at least {least} tokens; give longer ones, or fewer --answer-tokens")
    return _longest_first(passages)


def task_passages(
    file: Path, options: RecommendOptions, tokenizer: Any, length: int | None, most: int
) -> list[Passage]:
    """The prompts of a file of records; the full cache says the answers.

    Args:
        length: tokens of a prompt and its answer; a longer prompt loses its middle.

    Raises:
        UserError: the file cannot be read.
    """
    task = TaskFile.read(file, TaskFileOptions(**options.common(TaskFileOptions)))
    passages = []
    for sample in task.samples(most, labelled=False):
        wanted = sample.max_new_tokens
        longest = None if length is None else max(length - wanted, 2)
        prompt = encode(
            sample, tokenizer, question_aware=options.question_aware, max_length=longest, chat_template="auto"
        )
        passages.append(Passage(sample.id, prompt.context, prompt.question, (), wanted))
    return _longest_first(passages)


def make_texts(options: RecommendOptions) -> list[Text]:
    """The texts of the files that are named.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    files = [*(options.text or ()), *(options.files or ())]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"no such file: {', '.join(missing)}")
    return list(read_texts([str(file) for file in files]))


def _longest_first(passages: list[Passage]) -> list[Passage]:
    """What fits while the longest passage is read fits always. The others stay in their order."""
    first = max(range(len(passages)), key=lambda index: passages[index].tokens)
    return [passages[first], *passages[:first], *passages[first + 1 :]]
