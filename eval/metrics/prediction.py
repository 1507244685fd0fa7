"""The part of a prediction that is scored."""

from __future__ import annotations


def first_line_of(prediction: str) -> str:
    """The first line that is not empty; a line of blanks counts as one.

    LongBench scores trec, triviaqa, samsum and lsht by it: their prompts are lists of examples, which a model goes on
    with after its answer.
    """
    return prediction.lstrip("\n").split("\n", 1)[0]
