"""The answers of one group of prompts, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from .agreement import FullAnswer, divergence, identical_share, logits_along, recorded_logits
from .efficiency import Stopwatch, evicted_tokens, kv_bytes
from .generation import Generator, Judge, until_end
from .prefill import Inputs, after_forwards
from .start import Start


@dataclass(frozen=True)
class Decoding:
    """Answers that were generated together.

    Attributes:
        answers: tokens of each, with the one that ended it.
        costs: `efficiency` of each row; what is measured once per batch is the same in all of them.
        logits: `[rows, vocabulary]` per token, what it was chosen by, on the CPU; empty where nobody asks.
    """

    answers: list[list[int]]
    costs: list[dict[str, Any]]
    logits: list[Tensor]

    def full_answer(self, row: int) -> FullAnswer:
        """One answer with its logits, where they were asked for."""
        tokens = tuple(self.answers[row])
        return FullAnswer(tokens, torch.stack([step[row] for step in self.logits[: len(tokens)]]))


def decode(
    generator: Generator,
    inputs: Inputs,
    start: Start,
    limits: Sequence[int],
    *,
    record: bool = False,
    tell: Callable[[int, int], None] | None = None,
    judges: Sequence[Judge] = (),
) -> Decoding:
    """Continue from the first tokens until every answer has ended.

    Args:
        limits: most tokens per row.
        record: keep the logits that each token was chosen by.
        tell: told after every forward how many of how many tokens there are.
        judges: one per row, where an answer ends as soon as it is right.
    """
    watch, steps, most = Stopwatch(inputs.ids.device), count(1), max(limits)
    with (
        recorded_logits(generator.model, record) as logits,
        after_forwards(generator.model, None if tell is None else lambda *_: tell(min(next(steps), most), most)),
    ):
        output = generator.rest(inputs, start.first.tokens, start.cache, limits, judges)
        seconds = watch.lap()
    answers = [
        until_end(tokens, limit, generator.ends, judge)
        for tokens, limit, judge in zip(output.tolist(), limits, judges or repeat(None, len(limits)), strict=True)
    ]
    first = start.first.logits
    costs = _costs(start, len(answers), seconds, output.shape[1] - 1)
    return Decoding(answers, costs, [first, *logits] if record and first is not None else [])


def follow(
    generator: Generator, inputs: Inputs, start: Start, full: Sequence[FullAnswer]
) -> tuple[Decoding, list[dict[str, float]]]:
    """Feed the full cache's answers in one forward, within which nothing is evicted.

    Args:
        start: with the logits of the first tokens; its cache is used up.
        full: one answer per row.

    Returns:
        The model's own prediction at each token, up to the first that ends an answer; and its agreement with the full
        cache, as of `mean_kl` and `identical_share`.
    """
    watch = Stopwatch(inputs.ids.device)
    logits = logits_along(generator.model, inputs, start.cache, start.first.logits, full)
    seconds = watch.lap()
    predicted = [states.argmax(-1).tolist() for states in logits]
    agreement = [
        {"identical": identical_share(tokens, answer), "kl": float(divergence(answer.logits, states).double().mean())}
        for tokens, answer, states in zip(predicted, full, logits, strict=True)
    ]
    answers = [until_end(tokens, len(tokens), generator.ends) for tokens in predicted]
    return Decoding(answers, _costs(start, len(predicted), seconds, 1), []), agreement


def _costs(start: Start, rows: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    """`Decoding.costs`, after this many steps."""
    common = {
        "batch_rows": rows,
        "prefill_seconds": start.prefill_seconds,
        "decode_seconds": seconds,
        "decode_steps": steps,
        "kv_bytes": kv_bytes(start.cache) // rows,
    }
    return [common | {"evicted_tokens": tokens} for tokens in evicted_tokens(start.cache, rows)]
