"""The 13 tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654), made without a download.

What is as in RULER: kinds of tasks, numbers of needles, keys, hops and words, repetitions, the format of needles, of
the prompts of its eight needle tasks and of documents, lengths that count prompt and answer, tokens of an answer, and
the score. What is not: see the docstring of each module. The essays of Paul Graham, the word lists of wonderwords,
SQuAD and HotpotQA are replaced by text made here, and the sizes fill the length more closely. **Scores are not
comparable with published RULER scores**, only with scores from this package.
"""

from __future__ import annotations

from ..sized import SizedTask
from .counting import CODED_WORDS, COMMON_WORDS
from .needles import NEEDLE_TASKS
from .questions import QUESTION_TASKS
from .variables import VARIABLES

RULER: tuple[SizedTask, ...] = (*NEEDLE_TASKS, VARIABLES, COMMON_WORDS, CODED_WORDS, *QUESTION_TASKS)
"""All of them, in the order of the paper's table."""

__all__ = ["RULER"]
