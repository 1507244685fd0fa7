"""Ctrl-C while the model works."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


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
