"""One answer while it comes: who hears of it, and how Ctrl-C ends it."""

from __future__ import annotations

import signal
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, TextStreamer


class Listener(TextStreamer):  # type: ignore[misc]
    """Hears of an answer, whole word by whole word, and notes when its tokens came; this one shows nothing.

    Attributes:
        count: tokens of the answer so far.
        first: when the first of them came, by `perf_counter`; None before.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.count = 0
        self.first: float | None = None

    @property
    def seconds(self) -> float:
        """Since the first token."""
        return 0.0 if self.first is None else perf_counter() - self.first

    def reading(self, done: int, total: int) -> None:
        """So many of the new tokens were read."""

    def token(self) -> None:
        """There is one more token of the answer."""

    def text(self, piece: str) -> None:
        """The answer goes on like this."""

    def put(self, value: Tensor) -> None:
        prompt = self.next_tokens_are_prompt
        super().put(value)
        if not prompt:
            self.first = self.first or perf_counter()
            self.count += 1
            self.token()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.text(text)


class Interrupt(StoppingCriteria):  # type: ignore[misc]
    """Turns Ctrl-C into a wish, so that the forward under way is finished and all layers have seen the same tokens.

    The second Ctrl-C raises `KeyboardInterrupt`: then the cache is of no use any more.

    Attributes:
        wanted: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, *_: object) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """`[rows]` bool: end the answer after the token that is under way."""
        return torch.full(input_ids.shape[:1], self.wanted, dtype=torch.bool, device=input_ids.device)
