"""A passage read with a cache, and how far that leads from what the full cache foretells.

As deployed: the prompt in chunks, evicting between them, then token by token. What comes next is given, whatever the
model would say: the same for all caches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.feeding import feed

from ..running.agreement import divergence
from ..running.efficiency import Stopwatch
from ..running.perplexity import SAID
from ..running.prefill import input_device
from .passages import Passage


@dataclass(frozen=True)
class Reference:
    """What the full cache foretold.

    Attributes:
        answers: ids that follow each prompt, those of the passage or its own.
        reading: `[rows, places, vocabulary]` logits in the prompts.
        answering: `[rows, answer, vocabulary]` logits before each token of the answers.
    """

    answers: tuple[tuple[int, ...], ...]
    reading: Tensor
    answering: Tensor


@dataclass(frozen=True)
class Measured:
    """One reading.

    Attributes:
        reading: mean divergence in nats over the places in the prompt.
        answering: mean divergence in nats over the answer.
        step_ms: median time of the forwards of one token; None where several rows were read together.
        seconds: all forwards, shared out among the rows.
        tokens: that were fed.
    """

    reading: float
    answering: float
    step_ms: float | None
    seconds: float
    tokens: int


class Reader:
    """Reads some passages together with many caches, one after the other.

    Args:
        passages: of equal lengths where there are several, with answers that are given.
        chunk: tokens per forward while the prompt is read.
        places: in the prompt, where distributions are compared.
        ends: ids that end an answer that the full cache says.
    """

    def __init__(
        self, model: Any, passages: Sequence[Passage], chunk: int, places: int, ends: frozenset[int] = frozenset()
    ) -> None:
        self._model, self._passages, self._ends = model, passages, ends
        self._device, first = input_device(model), passages[0]
        self._forwards = list(first.forwards(chunk))
        self._prompt_tokens = len(first.prompt)
        last = self._prompt_tokens - 1  # after it the answer begins
        self.places = torch.linspace(0, last - 1, min(places, last)).round().long().unique()
        self._seconds: list[float] = []

    @torch.inference_mode()
    def reference(self) -> tuple[Reference, list[Measured], DynamicCache]:
        """Read with the full cache."""
        cache = DynamicCache(config=self._model.config)
        read: list[Tensor] = []
        with _quiet():
            for places, logits in self._prompt(cache):
                read.append(logits[:, places])
            answers, answering = self._answer(cache, logits[:, -1])
        found = Reference(answers, torch.cat(read, dim=1), torch.stack(answering, dim=1))
        nothing = torch.zeros(len(answers), 1)
        return found, self._measured(nothing, nothing, found), cache

    @torch.inference_mode()
    def measure(self, cache: PagedEvictionCache, reference: Reference) -> list[Measured]:
        """Read with another cache, which is used up; one result per passage."""
        at, read = 0, []
        with _quiet():
            for places, logits in self._prompt(cache):
                full = reference.reading[:, at : at + len(places)]
                read.append(_divergences(full, logits[:, places]))
                at += len(places)
            answered = [_divergences(reference.answering[:, :1], logits[:, -1:])]
            for index in range(1, len(reference.answers[0])):
                found = self._step(cache, [answer[index - 1] for answer in reference.answers], index)
                answered.append(_divergences(reference.answering[:, index : index + 1], found[:, None]))
        return self._measured(torch.cat(read, dim=1), torch.cat(answered, dim=1), reference)

    def _answer(self, cache: DynamicCache, first: Tensor) -> tuple[tuple[tuple[int, ...], ...], list[Tensor]]:
        """The answers that are given, or what this cache says; and the logits before each of their tokens."""
        found = [first]
        given = tuple(passage.answer for passage in self._passages)
        if given[0]:
            while len(found) < len(given[0]):
                found.append(self._step(cache, [answer[len(found) - 1] for answer in given], len(found)))
            return given, found
        said = [int(first.argmax())]
        while len(said) < self._passages[0].answer_tokens and said[-1] not in self._ends:
            found.append(self._step(cache, said[-1:], len(said)))
            said.append(int(found[-1].argmax()))
        return (tuple(said),), found

    def _prompt(self, cache: DynamicCache) -> Iterator[tuple[Tensor, Tensor]]:
        """Places within each forward of the prompts, and its logits `[rows, tokens, vocabulary]`."""
        self._seconds = []
        ids = torch.tensor([passage.prompt for passage in self._passages], device=self._device)
        watch = Stopwatch(self._device)
        for start, end in self._forwards:
            positions = torch.arange(start, end, device=self._device).expand(len(ids), -1)
            logits = feed(self._model, ids[:, start:end], None, cache, positions=positions, keep=0)
            self._seconds.append(watch.lap())
            here = self.places[(self.places >= start) & (self.places < end)] - start
            yield here.to(logits.device), logits
            watch.lap()

    def _step(self, cache: DynamicCache, tokens: Sequence[int], index: int) -> Tensor:
        """Feed token `index - 1` of the answers; the logits `[rows, vocabulary]` after it."""
        ids = torch.tensor(tokens, device=self._device)[:, None]
        positions = torch.full_like(ids, self._prompt_tokens + index - 1)
        watch = Stopwatch(self._device)
        logits = feed(self._model, ids, None, cache, positions=positions)[:, -1]
        self._seconds.append(watch.lap())
        return logits

    def _measured(self, read: Tensor, answered: Tensor, reference: Reference) -> list[Measured]:
        rows, steps = len(self._passages), self._seconds[len(self._forwards) :]
        step_ms = 1000 * median(steps) if steps and rows == 1 else None
        tokens = self._prompt_tokens + len(reference.answers[0]) - 1
        return [
            Measured(float(reading), float(answering), step_ms, sum(self._seconds) / rows, tokens)
            for reading, answering in zip(read.double().mean(1), answered.double().mean(1), strict=True)
        ]


def _divergences(full: Tensor, logits: Tensor) -> Tensor:
    """`[rows, n]` of logits `[rows, n, vocabulary]`."""
    return divergence(full.flatten(0, 1), logits.flatten(0, 1)).view(full.shape[:2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what is known: there are no pads, and how long the passages are was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SAID)
        yield
