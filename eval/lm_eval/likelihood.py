"""The likelihood of continuations of a context that has been compressed.

A single forward over context and continuation, as the harness does it, evicts nothing before its end and would give the
numbers of the full cache. So the context, without its last token, is read and compressed first. Its last token and the
continuation follow the way generated tokens do: once the budget is full, one at a time, each evicting. Every scored
token is therefore predicted from at most `budget` tokens held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: (tokens `[rows, n]`, mask `[rows, seen + n]`, positions `[rows, n]`, k) -> what the model expects after the last `k`
#: of these tokens, as log-probabilities `[rows, k, vocabulary]`.
Forward = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Row:
    """A context and what follows it, of which the last token may be one of several.

    Attributes:
        context: token ids, at least one.
        middle: token ids of the continuation without its last one.
        last: candidates for the last token.
    """

    context: tuple[int, ...]
    middle: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """What goes through the compressed cache: one prediction each."""
        return (self.context[-1], *self.middle)


Answer = tuple[float, bool]


def score(
    forward: Forward, rows: Sequence[Row], room: int, chunk: int | None, device: torch.device
) -> list[list[Answer]]:
    """Log-likelihood, and whether greedy decoding would give it, for each row and each of its last tokens.

    Args:
        forward: the model, with an empty cache.
        rows: what to score, together.
        room: tokens up to which feeding several at once is the same as one at a time, because nothing is evicted.
        chunk: tokens of the context per forward; None = all at once.
        device: of the model's inputs.
    """
    prompts, mask = _pad([row.context[:-1] for row in rows], left=True)
    fed, _ = _pad([row.fed for row in rows], left=False)
    # What is fed to a row that has ended changes no other row, so it may count as real.
    mask = torch.cat([mask, torch.ones_like(fed)], dim=1).to(device)
    ids = torch.cat([prompts, fed], dim=1).to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    start, end = prompts.shape[1], ids.shape[1]

    def run(first: int, stop: int, keep: int) -> Tensor:
        return forward(ids[:, first:stop], mask[:, :stop], positions[:, first:stop], keep)

    step = chunk or max(start, 1)
    for first in range(0, start, step):
        run(first, min(first + step, start), 1)
    tally = _Tally(rows, device)
    while start < end:
        stop = min(end, max(start + 1, room))
        tally.add(run(start, stop, stop - start))
        start = stop
    return tally.answers()


class _Tally:
    """Adds up what each row's tokens score, forward by forward, so that no more than one is held."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._rows = rows
        self._seen = 0
        self._targets, valid = (part.to(device) for part in _pad([row.middle for row in rows], left=False))
        self._valid = valid.bool()
        self._sums = torch.zeros(len(rows), device=device)
        self._greedy = torch.ones(len(rows), dtype=torch.bool, device=device)
        self._answers: list[list[Answer]] = [[] for _ in rows]

    def add(self, scores: Tensor) -> None:
        """`scores`: log-probabilities `[rows, n, vocabulary]` after the next `n` fed tokens."""
        first, self._seen = self._seen, self._seen + scores.shape[1]
        targets, valid = self._targets[:, first : self._seen], self._valid[:, first : self._seen]
        scored = scores[:, : targets.shape[1]]
        reached = scored.gather(-1, targets[..., None])[..., 0].float()
        self._sums += reached.where(valid, 0.0).sum(-1)
        self._greedy &= ((scored.argmax(-1) == targets) | ~valid).all(-1)
        for index, row in enumerate(self._rows):
            if first <= len(row.middle) < self._seen:
                self._finish(index, scores[index, len(row.middle) - first])

    def _finish(self, index: int, scores: Tensor) -> None:
        last = self._rows[index].last
        before, greedy, best = float(self._sums[index]), bool(self._greedy[index]), int(scores.argmax())
        values = scores[list(last)].tolist()
        self._answers[index] = [
            (before + value, greedy and token == best) for token, value in zip(last, values, strict=True)
        ]

    def answers(self) -> list[list[Answer]]:
        return self._answers


def _pad(rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both `[rows, longest]` int64; pads are id 0."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[index, place] = torch.tensor(row, dtype=torch.int64)
        mask[index, place] = 1
    return ids, mask
