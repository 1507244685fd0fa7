"""Right answers that are objects, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def json_answer(metric: str, answers: Sequence[str], accepts: Callable[[Any], bool], like: str) -> dict[str, Any]:
    """The object in the only answer, whose values are all accepted.

    Raises:
        ValueError: there is another number of answers, or it is no such object; says what one is like.
    """
    try:
        found = json.loads(answers[0]) if len(answers) == 1 else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found or not all(map(accepts, found.values())):
        raise ValueError(f"metric {metric!r} needs one answer like {like}, not {list(answers)!r:.60}")
    return found
