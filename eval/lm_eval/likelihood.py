"""The likelihood of continuations of a context that has been compressed.

A single forward over context and continuation, as the harness does it, evicts nothing before its end and would give the
numbers of the full cache. So the context, without its last token, is read and compressed first. Its last token and the
continuation are fed like generated tokens: once the budget is full, one at a time, each with an eviction. Every scored
token is therefore predicted from at most `budget` tokens held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: (tokens `[rows, n]`, mask `[rows, seen + n]`, k) -> what the model expects after the last `k` of these tokens, as
#: log-probabilities `[rows, k, vocabulary]`.
Forward = Callable[[Tensor, Tensor, int], Tensor]
Answer = tuple[float, bool]


class Row(NamedTuple):
    """Token ids: a context, at least one; what follows it without its last token; and candidates for that one."""

    context: tuple[int, ...]
    middle: tuple[int, ...]
    last: tuple[int, ...]


def score(
    forward: Forward, rows: Sequence[Row], room: int, chunk: int | None, device: torch.device
) -> list[list[Answer]]:
    """Log-likelihood, and whether greedy decoding would give it, for each row and each of its last tokens.

    Args:
        forward: the model, with an empty cache.
        rows: what to score, together.
        room: length up to which several tokens may be fed at once, because nothing is evicted yet.
        chunk: tokens of the context per forward; None = all at once.
        device: of the model's inputs.
    """
    contexts = [torch.tensor(row.context[:-1], dtype=torch.int64) for row in rows]
    prompts = pad_sequence(contexts, batch_first=True, padding_side="left")
    real = pad_sequence([torch.ones_like(context) for context in contexts], batch_first=True, padding_side="left")
    fed = pad_sequence([torch.tensor([row.context[-1], *row.middle]) for row in rows], batch_first=True)
    ids = torch.cat([prompts, fed], dim=1).to(device)
    # What is fed to a row that has ended changes no other row, so it may count as real.
    mask = torch.cat([real, torch.ones_like(fed)], dim=1).to(device)
    start, end = prompts.shape[1], ids.shape[1]
    for first in range(0, start, chunk or max(start, 1)):
        stop = min(first + chunk, start) if chunk else start
        forward(ids[:, first:stop], mask[:, :stop], 1)
    wanted, reached, best = _targets(rows, end - start).to(device), [], []
    at = start
    while at < end:
        stop = min(end, max(at + 1, room))
        scores = forward(ids[:, at:stop], mask[:, :stop], stop - at)
        reached.append(scores.gather(-1, wanted[:, at - start : stop - start]).float())
        best.append(scores.argmax(-1))
        at = stop
    columns = zip(rows, torch.cat(reached, dim=1).tolist(), torch.cat(best, dim=1).tolist(), strict=True)
    return [_answers(row, likelihoods, greedy) for row, likelihoods, greedy in columns]


def _targets(rows: Sequence[Row], count: int) -> Tensor:
    """What comes after each fed token `[rows, count, candidates]`; 0 where there is nothing."""
    targets = torch.zeros(len(rows), count, max(len(row.last) for row in rows), dtype=torch.int64)
    for target, row in zip(targets, rows, strict=True):
        length = len(row.middle)
        target[:length, 0] = torch.tensor(row.middle, dtype=torch.int64)
        target[length, : len(row.last)] = torch.tensor(row.last)
    return targets


def _answers(row: Row, likelihoods: list[list[float]], greedy: list[int]) -> list[Answer]:
    """The answers to a row, of the likelihoods of its targets and the greedy choice at each."""
    length = len(row.middle)
    before, as_greedy = sum(first for first, *_ in likelihoods[:length]), greedy[:length] == list(row.middle)
    last = zip(row.last, likelihoods[length], strict=False)
    return [(before + likelihood, as_greedy and token == greedy[length]) for token, likelihood in last]
