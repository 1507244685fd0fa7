"""Decodes token by token, as `generate` does it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import CACHE_ARGUMENT

from ...running.efficiency import Stopwatch
from ..variants import Held


class Decoder:
    """One filled cache, and the steps that are timed on it.

    A step is what `generate` does for a token: inputs prepared by the model (for a compileable cache with the 4-D mask,
    made outside of the compiled forward), the forward, the next token by argmax. Nothing waits for the device in
    between, other than what the model and the cache do.

    Args:
        model: any decoder of transformers.
        forward: its forward, compiled or not.
        held: a filled cache.
        rows: batch size.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], held: Held, rows: int) -> None:
        self.model, self.forward, self.held, self.rows = model, forward, held, rows
        self.token = torch.full((rows, 1), 7, dtype=torch.long, device=model.device)
        self.seen = held.seen
        self._accepted = inspect.signature(model.prepare_inputs_for_generation).parameters

    @torch.no_grad()
    def run(self, steps: int) -> float:
        """Decode `steps` tokens per row; seconds. A cache that grows is taken back first, outside of the timing."""
        if self.held.rewinds:
            self._rewind()
        mask = torch.ones(self.rows, self.seen + 1, dtype=torch.long, device=self.model.device)
        position = torch.full((self.rows, 1), self.seen, dtype=torch.long, device=self.model.device)
        with self.held.around():
            watch = Stopwatch(self.model.device)
            for _ in range(steps):
                self._step(mask, position)
                mask = torch.cat([mask, mask.new_ones(self.rows, 1)], dim=-1)
                position = position + 1
                self.seen += 1
            return watch.lap()

    def _step(self, mask: Tensor, position: Tensor) -> None:
        extra: dict[str, Any] = {}
        if "next_sequence_length" in self._accepted:
            extra["next_sequence_length"] = 1
        if "cache_position" in self._accepted:  # before transformers 5.4
            extra["cache_position"] = position[0]
        inputs = self.model.prepare_inputs_for_generation(
            self.token,
            **{CACHE_ARGUMENT: self.held.cache},
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **extra,
        )
        logits = self.forward(**inputs, return_dict=True).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)

    def _rewind(self) -> None:
        cache, grown = self.held.cache, self.seen - self.held.seen
        if not grown:
            return
        static = [layer for layer in cache.layers if getattr(layer, "is_compileable", False)]
        for layer in static:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor) and not layer.is_sliding:
                length.fill_(self.held.seen)
        # A sliding layer cannot be taken back, and neither can a cache with one: it goes on growing, by few tokens.
        if not static and not any(getattr(layer, "is_sliding", False) for layer in cache.layers):
            cache.crop(-grown)
        elif not static:
            return
        self.seen = self.held.seen
