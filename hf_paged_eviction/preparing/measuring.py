"""Measure the divergence of a cache's predictions from those of the full cache."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from ..cache import PagedEvictionCache
from ..integration.feeding import feed
from ..learned.measured import KNOWN, TEXT, UNKNOWN
from .passages import Passage
from .recording import Recording

#: Makes an empty cache for a prompt of so many tokens.
Make = Callable[[int], PagedEvictionCache]

#: Tokens of an answer, most of the longest.
ANSWER = 12
#: Questions of a passage that are also asked at the end of the prompt, each of which is a prompt of its own.
ASKED_IN_PROMPT = 2


@dataclass(frozen=True)
class _Trial:
    """Texts that follow a prompt, and what the full cache predicts of them.

    Attributes:
        aspect: one of `ASPECTS`.
        prompt: tokens that are read in one forward.
        rests: `[rows, n]`; each row is a text of its own that follows the prompt.
        full: `[rows, m, vocabulary]`, log-probabilities of the full cache after each of the last `m` tokens.
    """

    aspect: str
    prompt: Recording
    rests: Tensor
    full: Tensor

    def divergences(self, model: Any, cache: PagedEvictionCache) -> Iterator[float]:
        """Yield the KL divergence of each continuation in nats per token; `cache` holds the prompt, and is consumed."""
        if len(self.rests) > 1:
            cache.batch_repeat_interleave(len(self.rests))
        cache.activate_past_recording()  # nothing comes behind these tokens, so nothing has to go for them
        count = self.full.shape[1]
        for logits, full in zip(feed(model, self.rests, None, cache, keep=count), self.full, strict=True):
            difference = logits[-count:].float().log_softmax(-1).sub_(full)
            yield -float(vecdot(full.exp(), difference).mean())


class Trials:
    """One passage, read once with the full cache, for comparisons with any number of caches.

    Attributes:
        token: see `TokenStates`.

    Args:
        model: model with the attention implementation "paged_eviction".
        passage: text with a continuation and questions.
    """

    def __init__(self, model: Any, passage: Passage) -> None:
        self._model = model
        device = model.get_input_embeddings().weight.device
        context = Recording(model, passage.context.to(device))
        self.token = context.token
        self.trials: list[_Trial] = []
        if passage.continuation is not None:
            rest = passage.continuation.to(device)
            full = feed(model, rest, None, copy.deepcopy(context.cache), keep=0)
            self.trials.append(_Trial(TEXT, context, rest, full.float().log_softmax(-1)))
        if passage.questions:
            self.trials += self._asked(context, [question.to(device) for question in passage.questions])

    def _asked(self, context: Recording, questions: Sequence[Tensor]) -> Iterator[_Trial]:
        """The questions with their answers, once the context is read, and some of them in the prompt."""
        cache, asked = copy.deepcopy(context.cache), torch.cat(list(questions))
        cache.batch_repeat_interleave(len(questions))
        logits = [feed(self._model, asked, None, cache)[:, -1:]]
        for _ in range(ANSWER):
            logits.append(feed(self._model, logits[-1].argmax(-1), None, cache)[:, -1:])
        answers = torch.cat([step.argmax(-1) for step in logits[:-1]], dim=1)
        full = torch.cat(logits, dim=1).float().log_softmax(-1)
        yield _Trial(UNKNOWN, context, torch.cat([asked, answers], dim=1), full)
        for row, question in enumerate(questions[:ASKED_IN_PROMPT]):
            prompt = Recording(self._model, question, context)
            yield _Trial(KNOWN, prompt, answers[row : row + 1], full[row : row + 1, 1:])

    def divergences(self, make: Make) -> Iterator[tuple[str, float]]:
        """Yield the aspect and the KL divergence from the full cache, in nats per token, for each continuation and
        question."""
        for prompt, same in groupby(self.trials, lambda trial: trial.prompt):
            cache, trials = make(prompt.ids.shape[1]), list(same)
            prompt.play(cache)
            for trial in trials:
                own = cache if trial is trials[-1] else copy.deepcopy(cache)
                for divergence in trial.divergences(self._model, own):
                    yield trial.aspect, divergence
