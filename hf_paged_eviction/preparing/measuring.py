"""How far a cache's predictions are from those of the full cache."""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import PagedEvictionCache
from ..integration.feeding import feed
from ..learned.measured import ASPECTS, BEFORE, LATER, TEXT
from .passages import Passage
from .recording import Recording

#: Makes an empty cache that is to hold a share of so many tokens.
Make = Callable[[int], PagedEvictionCache]

#: Tokens of an answer.
ANSWER = 8
#: Questions of a passage that are also asked at the end of the prompt, each of which is a prompt of its own.
_BEFORE = 2


@dataclass(frozen=True)
class _Trial:
    """What follows a prompt, and what the full cache makes of it.

    Attributes:
        aspect: one of `ASPECTS`.
        prompt: what is read at once.
        rest: `[1, n]`, fed after it.
        full: `[n, vocabulary]` log-probabilities of the full cache behind the last of these.
    """

    aspect: str
    prompt: Recording
    rest: Tensor
    full: Tensor


class Trials:
    """One passage, read once by the full cache, ready for any number of others.

    Attributes:
        token_bytes: that the full cache takes for a token, in layers that evict.

    Args:
        model: with the attention implementation "paged_eviction".
        passage: what is read.
    """

    def __init__(self, model: Any, passage: Passage) -> None:
        self._model = model
        device = model.get_input_embeddings().weight.device
        context = Recording(model, passage.context.to(device))
        self.token_bytes = context.token_bytes
        self.trials: list[_Trial] = []
        if passage.continuation is not None:
            rest = passage.continuation.to(device)
            full = feed(model, rest, None, copy.deepcopy(context.cache), keep=0)
            self.trials.append(_Trial(TEXT, context, rest, full[0].float().log_softmax(-1)))
        for number, question in enumerate(passage.questions):
            self._ask(context, question.to(device), number < _BEFORE)

    def _ask(self, context: Recording, question: Tensor, before: bool) -> None:
        """Once with the question behind the prompt, and once at its end, if `before`."""
        asked = Recording(self._model, question, context)
        cache, logits = asked.cache, [asked.logits]
        for _ in range(ANSWER):
            logits.append(feed(self._model, logits[-1].argmax(-1)[:, None], None, cache)[:, -1])
        answer = torch.cat([each.argmax(-1)[:, None] for each in logits[:-1]], dim=1)
        full = torch.cat(logits).float().log_softmax(-1)
        self.trials.append(_Trial(LATER, context, torch.cat([question, answer], dim=1), full))
        if before:
            self.trials.append(_Trial(BEFORE, asked, answer, full[1:]))

    def divergences(self, make: Make, aspects: Collection[str] = ASPECTS) -> Iterator[tuple[str, float]]:
        """KL divergence of a cache from the full one in nats per token, for each trial, with its aspect."""
        read: dict[int, PagedEvictionCache] = {}
        for trial in self.trials:
            if trial.aspect not in aspects:
                continue
            if id(trial.prompt) not in read:
                read[id(trial.prompt)] = cache = make(trial.prompt.ids.shape[1])
                trial.prompt.play(cache)
            cache = copy.deepcopy(read[id(trial.prompt)])
            found = feed(self._model, trial.rest, None, cache, keep=0)[0, -len(trial.full) :].float().log_softmax(-1)
            yield trial.aspect, float((trial.full.exp() * (trial.full - found)).sum(-1).mean())
