"""A model that reads tokens into a cache and answers, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList, TextStreamer

from ..running.generation import end_tokens, plain_settings, without_sampling
from ..running.prefill import feed, input_device
from .interrupt import Interrupt, StopWhenWanted
from .settings import Sampling


class Listener:
    """Who wants to know how far an answer is; this one does not."""

    def reading(self, done: int, total: int) -> None:
        """So many of the new tokens were read."""

    def token(self, count: int, seconds: float) -> None:
        """So many tokens of the answer are there; `seconds` since the first one."""

    def text(self, piece: str) -> None:
        """The answer goes on like this."""


class Voice:
    """Feeds what a cache has not seen yet, and generates behind it.

    Attributes:
        ends: ids that end an answer.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling, chunk: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._sampling, self._chunk = sampling, chunk
        self._device = input_device(model)
        self.ends = end_tokens(model, tokenizer)

    def read(self, ids: Sequence[int], cache: DynamicCache, listener: Listener, interrupt: Interrupt) -> bool:
        """Feed all new tokens but those of the last chunk, which `answer` feeds; False if Ctrl-C came first."""
        start = seen = cache.get_seq_length()
        while len(ids) - seen > self._chunk and not interrupt.wanted:
            stop = seen + self._chunk
            feed(self.model, self._row(ids[seen:stop]), torch.ones(1, stop, dtype=torch.int64).to(self._device), cache)
            seen = stop
            listener.reading(seen - start, len(ids) - start)
        return not interrupt.wanted

    @torch.inference_mode()
    def answer(
        self,
        ids: Sequence[int],
        cache: DynamicCache,
        turn: int,
        listener: Listener,
        interrupt: Interrupt,
        room: int | None = None,
    ) -> list[int]:
        """The tokens of the answer, with the one that ended it; the last one has not been fed to the cache.

        Args:
            turn: number of the message, for sampling.
            room: most tokens that the model has positions for.
        """
        row, sampling = self._row(ids), self._sampling
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed * 1_000_003 + turn)
            choice: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        else:
            choice = without_sampling(self.model.generation_config)
        output: Tensor = self.model.generate(
            input_ids=row,
            attention_mask=torch.ones_like(row),
            past_key_values=cache,
            do_sample=sampling.temperature > 0,
            max_new_tokens=sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room),
            streamer=_Stream(self.tokenizer, listener),
            stopping_criteria=StoppingCriteriaList([StopWhenWanted(interrupt)]),
            **plain_settings(self.ends, ids[-1:]),
            **choice,
        )
        answer: list[int] = output[0, len(ids) :].tolist()
        return answer

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as a person reads it."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.int64, device=self._device)


class _Stream(TextStreamer):  # type: ignore[misc]
    """Passes on whole words as soon as they are there."""

    def __init__(self, tokenizer: Any, listener: Listener) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._listener = listener
        self._count, self._since = 0, 0.0

    def put(self, value: Tensor) -> None:
        prompt = self.next_tokens_are_prompt
        super().put(value)
        if prompt:
            return
        if self._count == 0:
            self._since = perf_counter()
        self._count += 1
        self._listener.token(self._count, perf_counter() - self._since)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._listener.text(text)
