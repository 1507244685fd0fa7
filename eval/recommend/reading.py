"""A passage read with a cache, and how far that leads from what the full cache foretells.

As deployed: the prompt in chunks, evicting between them, then token by token. What comes next is given, whatever the
model would say: the same for all caches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.feeding import feed

from ..perplexity import SAID
from ..running.agreement import divergence
from ..running.efficiency import Stopwatch
from ..running.prefill import input_device
from .passages import Passage


@dataclass(frozen=True)
class Reference:
    """What the full cache foretold.

    Attributes:
        answer: ids that follow the prompt, those of the passage or its own.
        places: `[n]` int64 on the CPU, tokens of the prompt after which the next one was foretold.
        reading: `[n, vocabulary]` logits there.
        answering: `[answer, vocabulary]` logits before each token of the answer.
    """

    answer: tuple[int, ...]
    places: Tensor
    reading: Tensor
    answering: Tensor


@dataclass(frozen=True)
class Measured:
    """One reading.

    Attributes:
        reading: mean divergence in nats over `places`.
        answering: mean divergence in nats over the answer.
        step_ms: median time of the forwards of one token.
        seconds: all forwards.
        tokens: that were fed.
    """

    reading: float
    answering: float
    step_ms: float
    seconds: float
    tokens: int


class Reader:
    """Reads one passage with many caches.

    Args:
        chunk: tokens per forward while the prompt is read.
        places: in the prompt, where distributions are compared.
        ends: ids that end an answer that the full cache says.
    """

    def __init__(self, model: Any, passage: Passage, chunk: int, places: int, ends: frozenset[int]) -> None:
        self._model, self._passage, self._chunk, self._ends = model, passage, chunk, ends
        self._device = input_device(model)
        last = len(passage.prompt) - 1  # after it the answer begins
        count = min(places, last)
        self._places = torch.linspace(0, last - 1, count).round().long().unique() if count else torch.arange(0)
        self._seconds: list[float] = []

    @torch.inference_mode()
    def reference(self) -> tuple[Reference, Measured, DynamicCache]:
        """Read with the full cache."""
        cache = DynamicCache(config=self._model.config)
        read: list[Tensor] = []
        with self._quiet():
            for places, logits in self._prompt(cache):
                read.append(logits[places])
            answer, answering = self._answer(cache, logits[-1])
        found = Reference(answer, self._places, torch.cat(read), torch.stack(answering))
        return found, self._measured([], [], len(answer)), cache

    @torch.inference_mode()
    def measure(self, cache: PagedEvictionCache, reference: Reference) -> Measured:
        """Read with another cache, which is used up."""
        at, read = 0, []
        with self._quiet():
            for places, logits in self._prompt(cache):
                read.append(divergence(reference.reading[at : at + len(places)], logits[places]))
                at += len(places)
            answered = [divergence(reference.answering[:1], logits[-1:])]
            for index, token in enumerate(reference.answer[:-1], 1):
                found = self._step(cache, token, index)
                answered.append(divergence(reference.answering[index : index + 1], found[None]))
        return self._measured(read, answered, len(reference.answer))

    def _answer(self, cache: DynamicCache, first: Tensor) -> tuple[tuple[int, ...], list[Tensor]]:
        """The answer that is given, or what this cache says; and the logits before each of its tokens."""
        given, found = self._passage.answer, [first]
        answer = list(given or [int(first.argmax())])
        while len(found) < len(answer):
            found.append(self._step(cache, answer[len(found) - 1], len(found)))
        while not given and len(answer) < self._passage.answer_tokens and answer[-1] not in self._ends:
            found.append(self._step(cache, answer[-1], len(answer)))
            answer.append(int(found[-1].argmax()))
        return tuple(answer), found

    def _prompt(self, cache: DynamicCache) -> Iterator[tuple[Tensor, Tensor]]:
        """Places within each forward, and its logits `[tokens, vocabulary]`."""
        self._seconds = []
        ids = torch.tensor([self._passage.prompt], device=self._device)
        watch = Stopwatch(self._device)
        for start, end in self._passage.forwards(self._chunk):
            positions = torch.arange(start, end, device=self._device)[None]
            logits = feed(self._model, ids[:, start:end], None, cache, positions=positions, keep=0)[0]
            self._seconds.append(watch.lap())
            here = self._places[(self._places >= start) & (self._places < end)] - start
            yield here.to(logits.device), logits
            watch.lap()

    def _step(self, cache: DynamicCache, token: int, index: int) -> Tensor:
        """Feed token `index - 1` of the answer; the logits `[vocabulary]` after it."""
        ids = torch.tensor([[token]], device=self._device)
        position = torch.tensor([[len(self._passage.prompt) + index - 1]], device=self._device)
        watch = Stopwatch(self._device)
        logits = feed(self._model, ids, None, cache, positions=position)[0, -1]
        self._seconds.append(watch.lap())
        return logits

    def _measured(self, read: list[Tensor], answered: list[Tensor], answer: int) -> Measured:
        forwards = len(list(self._passage.forwards(self._chunk)))
        steps = self._seconds[forwards:]
        return Measured(
            reading=_mean(read),
            answering=_mean(answered),
            step_ms=1000 * median(steps) if steps else 0.0,
            seconds=sum(self._seconds),
            tokens=len(self._passage.prompt) + answer - 1,
        )

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=SAID)
            yield


def _mean(parts: list[Tensor]) -> float:
    found = torch.cat(parts) if parts else torch.zeros(0)
    return float(found.double().mean()) if len(found) else 0.0
