"""A file of answers of lm-evaluation-harness belongs to one model and one cache."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from ..errors import UserError
from ..store.results import differences

#: No key of the harness, which are digests.
_KEY = "hf_paged_eviction"


def own_answers(answers: MutableMapping[str, Any], meaning: dict[str, Any]) -> None:
    """Write down what decides the answers of a file, or compare.

    Args:
        answers: what the harness keeps in the file, by the digest of a question.
        meaning: what decides an answer besides the question.

    Raises:
        UserError: they are those of another model or cache, or nobody knows whose.
    """
    if _KEY in answers:
        before = json.loads(answers[_KEY])
        if changed := differences(before, meaning):
            raise UserError(
                f"--use_cache: the answers in this file are of other settings ({', '.join(changed)}), and are found by "
                "the question alone: give a file of its own for each"
            )
    elif len(answers):
        raise UserError(
            "--use_cache: this file has answers, and nothing says of which model and cache; they are found by the "
            "question alone, so give a new file"
        )
    answers[_KEY] = json.dumps(meaning)
    getattr(answers, "commit", lambda: None)()
