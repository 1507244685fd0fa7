"""How much a server takes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request, and all of them, may ask for.

    Attributes:
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        window: tokens of a prompt and its answer together; None: no bound.
        queue: answers that are being worked on or waited for.
        grace: seconds that a server which was told to stop goes on with what it has begun.
    """

    prompt: int
    answer: int
    window: int | None
    queue: int
    grace: float
