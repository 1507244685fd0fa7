"""`positions="cache"`, slow and obvious: every query is computed anew with the keys at the places where they stood.

The model's own attention modules do it, from the hidden states, with the rotary embedding of those places: nothing is
turned, so nothing here knows how the package turns keys.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from reference import Recorder, assert_said

NAME = "slow_positions"
#: [row][kv head] -> column -> how far forward a query saw it
Shifts = list[list[dict[int, int]]]


class PlacesRecorder(Recorder):
    """Notes for every query, besides what it saw, how far forward the tokens had been moved; checks that order is kept
    and distances are bounded."""

    def _watch(self, index: int, layer: Any, update: Any) -> Any:
        watched = super()._watch(index, layer, update)

        def with_shifts(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            layer.commit()
            before = self._shifts(layer, keys.shape[:2])
            result = watched(keys, values, *args, **kwargs)
            overwrites = keys.shape[2] == 1 and not layer.state.waiting
            noted = self._shifts(layer, keys.shape[:2]) if overwrites else before
            for column in self.new:
                column.shifts[index] = noted
                if layer.store.rerotation is not None:
                    self._check_places(layer, index, column, noted)
            return result

        return with_shifts

    def _shifts(self, layer: Any, shape: Any) -> Shifts:
        if not layer.held:
            return [[{} for _ in range(shape[1])] for _ in range(shape[0])]
        column_of = self._column_of()
        return [
            [
                {column_of[row][p]: s for p, s in zip(*head, strict=True) if p >= 0}
                for head in zip(positions, shifts, strict=True)
            ]
            for row, (positions, shifts) in enumerate(zip(layer.positions.tolist(), layer.shifts.tolist(), strict=True))
        ]

    def _check_places(self, layer: Any, index: int, column: Any, noted: Shifts) -> None:
        block, budget, at = (
            layer.budget.block_size,
            layer.budget.capacity,
            [c is column for c in self.columns].index(True),
        )
        for row, heads in enumerate(column.visible[index]):
            if not column.real[row]:
                continue
            counted = {c: place for place, c in enumerate(self._column_of()[row])}
            own = counted[at]
            for head, visible in enumerate(heads):
                places = [counted[c] + noted[row][head].get(c, 0) for c in sorted(visible)]
                assert places == sorted(set(places)), "the order of the text is lost"
                assert places[-1] <= own, "a token stands behind the query"
                assert own - places[0] < budget + len(self.new) + block - 1, "a distance is longer than promised"


def placed_logits(model: Any, recorder: PlacesRecorder) -> Tensor:
    """[rows, columns, vocabulary] of one forward without a cache over the recorded text."""
    columns = recorder.columns
    reference = copy.deepcopy(model)
    reference.set_attn_implementation(NAME)
    embeds = torch.stack([column.embeds for column in columns], dim=1)
    positions = torch.stack([column.position for column in columns], dim=1)
    with torch.no_grad(), _computed_slowly(reference, recorder, positions):
        return reference(
            inputs_embeds=embeds, attention_mask=recorder.mask, position_ids=positions, use_cache=False
        ).logits


def assert_exact_places(model: Any, recorder: PlacesRecorder) -> None:
    """Every logit of the run equals the slow one."""
    assert_said(recorder, placed_logits(model, recorder))


# ---- attention of one query at a time -------------------------------------------------------------------------------


@dataclass
class _Slow:
    """What the attention function does now: compute with this mask and keep the output, or hand out what was put
    together; neither = plain."""

    mask: Tensor | None = None
    output: Tensor | None = None
    ready: Tensor | None = None


_now = _Slow()


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    if _now.ready is not None:
        return _now.ready, None
    eager = sys.modules[type(module).__module__].eager_attention_forward
    mask = mask if _now.mask is None else _now.mask
    output = eager(module, query, key, value, mask, **kwargs)
    if _now.mask is not None:
        _now.output = output[0]
    return output


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@dataclass
class _Embedding:
    """The model's rotary embedding, and how it was called for what it returned."""

    calls: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], waves: Any) -> None:
        # The waves are kept, or another tensor could get their id.
        self.calls[id(waves if isinstance(waves, Tensor) else waves[0])] = (module, args, kwargs, waves)

    def at(self, waves: Any, positions: Tensor) -> Any:
        """The same call for other positions."""
        module, args, kwargs, _ = self.calls[id(waves if isinstance(waves, Tensor) else waves[0])]
        if "position_ids" in kwargs:
            return module.forward(*args, **{**kwargs, "position_ids": positions})
        return module.forward(args[0], positions, *args[2:], **kwargs)


@contextmanager
def _computed_slowly(model: Any, recorder: PlacesRecorder, positions: Tensor) -> Iterator[None]:
    embedding, paged, handles = _Embedding(), dict(recorder.cache.paged_layers), []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            handles.append(module.register_forward_hook(embedding.note, with_kwargs=True))
        if type(module).__name__.endswith("Attention") and getattr(module, "layer_idx", None) in paged:
            forward = module.forward
            slow = _slow_forward(module, forward, module.layer_idx, recorder, embedding, positions)
            module.__dict__["forward"] = slow
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slow_forward(
    module: Any, forward: Any, index: int, recorder: PlacesRecorder, embedding: _Embedding, positions: Tensor
) -> Any:
    columns = recorder.columns
    together: list[list[int]] = []
    for at, column in enumerate(columns):
        same = at and all(a is b for a, b in zip(column.shifts[index], columns[at - 1].shifts[index], strict=True))
        together = [*together[:-1], [*together[-1], at]] if same else [*together, [at]]

    def some_queries(which: list[int], head: int, waves: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Queries that saw all tokens at the same places."""
        rows, length = positions.shape
        places, sees = positions.clone(), torch.eye(length, dtype=torch.bool).repeat(rows, 1, 1)
        for row in range(rows):
            for column, moved in columns[which[0]].shifts[index][row][head].items():
                places[row, column] += moved
            for at in which:
                visible = columns[at].visible[index][row][head]
                if visible:
                    sees[row, at] = False
                    sees[row, at, sorted(visible)] = True
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        _now.mask = torch.zeros(rows, 1, length, length, dtype=hidden.dtype)
        _now.mask.masked_fill_(~sees[:, None], torch.finfo(hidden.dtype).min)
        try:
            forward(*args, **{**kwargs, "position_embeddings": embedding.at(waves, places)})
        finally:
            output, _now.mask = _now.output, None
        return output[:, which]

    def slow(*args: Any, **kwargs: Any) -> Any:
        waves = kwargs["position_embeddings"]
        heads = len(columns[0].visible[index][0])
        queries = []
        for which in together:
            # [rows, queries, query heads, dim] each
            outputs = [some_queries(which, head, waves, args, kwargs) for head in range(heads)]
            group = outputs[0].shape[2] // heads
            queries.append(torch.cat([out[:, :, h * group : (h + 1) * group] for h, out in enumerate(outputs)], dim=2))
        _now.ready = torch.cat(queries, dim=1)
        try:
            return forward(*args, **kwargs)
        finally:
            _now.ready = None

    return slow
