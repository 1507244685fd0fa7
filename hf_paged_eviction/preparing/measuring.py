"""Measure the divergence of a cache's predictions from those of the full cache."""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache import PagedEvictionCache
from ..integration.feeding import feed
from ..learned.measured import ASPECTS, BEFORE, LATER, TEXT
from .passages import Passage
from .recording import Recording

#: Makes an empty cache that holds a share of so many tokens.
Make = Callable[[int], PagedEvictionCache]

#: Tokens of an answer, most of the longest.
ANSWER = 16
#: Questions of a passage that are also asked at the end of the prompt, each of which is a prompt of its own.
_BEFORE = 2


@dataclass(frozen=True)
class _Trial:
    """What follows a prompt, in one way or in several, and what the full cache makes of it.

    Attributes:
        aspect: one of `ASPECTS`.
        prompt: what is read at once.
        rests: `[1, n]` each, fed after it, side by side.
        full: for each, `[m, vocabulary]` log-probabilities of the full cache behind its last `m` tokens.
    """

    aspect: str
    prompt: Recording
    rests: tuple[Tensor, ...]
    full: tuple[Tensor, ...]

    def divergences(self, model: Any, cache: PagedEvictionCache) -> Iterator[float]:
        """Yield the KL divergence of each continuation in nats per token; `cache` holds the prompt, and is consumed."""
        if len(self.rests) > 1:
            cache.batch_repeat_interleave(len(self.rests))
        longest = max(rest.shape[1] for rest in self.rests)
        # Padding after a shorter continuation is not visible to its tokens.
        ids = torch.cat([pad(rest, (0, longest - rest.shape[1])) for rest in self.rests])
        starts = [rest.shape[1] - len(full) for rest, full in zip(self.rests, self.full, strict=True)]
        logits = feed(model, ids, None, cache, keep=longest - min(starts))
        left_out = longest - logits.shape[1]
        for row, (start, full) in enumerate(zip(starts, self.full, strict=True)):
            log_probabilities = logits[row, start - left_out :][: len(full)].float().log_softmax(-1)
            yield float((full.exp() * (full - log_probabilities)).sum(-1).mean())


class Trials:
    """One passage, read once with the full cache, for comparisons with any number of caches.

    Attributes:
        token_bytes: bytes of a token in the full cache, in layers that evict.

    Args:
        model: model with the attention implementation "paged_eviction".
        passage: text with a continuation and questions.
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
            self.trials.append(_Trial(TEXT, context, (rest,), (full[0].float().log_softmax(-1),)))
        pairs = [self._ask(context, question.to(device), n < _BEFORE) for n, question in enumerate(passage.questions)]
        if pairs:
            self.trials.append(_Trial(LATER, context, *map(tuple, zip(*pairs, strict=True))))

    def _ask(self, context: Recording, question: Tensor, before: bool) -> tuple[Tensor, Tensor]:
        """A question with its answer, and the full cache's log-probabilities; if `before`, also asked in the prompt."""
        recording = Recording(self._model, question, context)
        cache, logits = recording.cache, [recording.logits]
        for _ in range(ANSWER):
            logits.append(feed(self._model, logits[-1].argmax(-1)[:, None], None, cache)[:, -1])
        answer = torch.cat([step_logits.argmax(-1)[:, None] for step_logits in logits[:-1]], dim=1)
        full = torch.cat(logits).float().log_softmax(-1)
        if before:
            self.trials.append(_Trial(BEFORE, recording, (answer,), (full[1:],)))
        return torch.cat([question, answer], dim=1), full

    def divergences(self, make: Make, aspects: Collection[str] = ASPECTS) -> Iterator[tuple[str, float]]:
        """Yield the aspect and the KL divergence from the full cache, in nats per token, for each continuation and
        question."""
        asked = [trial for trial in self.trials if trial.aspect in aspects]
        uses = Counter(id(trial.prompt) for trial in asked)
        read: dict[int, PagedEvictionCache] = {}
        for trial in asked:
            prompt = id(trial.prompt)
            if prompt not in read:
                read[prompt] = make(trial.prompt.ids.shape[1])
                trial.prompt.play(read[prompt])
            uses[prompt] -= 1
            cache = copy.deepcopy(read[prompt]) if uses[prompt] else read.pop(prompt)
            for divergence in trial.divergences(self._model, cache):
                yield trial.aspect, divergence
