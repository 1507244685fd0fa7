"""Attention of single queries to keys and values in segments of different length, without a padded copy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .parts import Part, join, read
from .weights import Logits


class SegmentsReader:
    """`InSegments.read`, by one prepared call of a function in C where that can be; a `Reader`.

    Args:
        held: the segments.
        bounds: see `Segments`.
    """

    def __init__(self, held: "InSegments", bounds: tuple[Tensor, Tensor]) -> None:
        self._held, self._bounds, self._prepared, self._kind = held, bounds, None, None
        parts = held.keys, held.values, *bounds
        kind = held.keys.dtype == held.values.dtype and held.keys.dtype in (torch.float32, torch.bfloat16)
        self._may = held.visible is None and kind and all([part.is_cpu and part.is_contiguous() for part in parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentsReader, (self._held, self._bounds)

    def __call__(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        plain = self._may and not torch.compiler.is_compiling() and not query.requires_grad
        if plain and logits.softcap is None and logits.sinks is None:
            if (query.shape, query.dtype, logits.scaling) != self._kind:
                self._prepare(query, logits)
            if self._prepared is not None:
                return self._prepared(query)
        return self._held.read(query, mask, logits)

    def _prepare(self, query: Tensor, logits: Logits) -> None:
        from ..precision import native

        self._kind, self._prepared = (query.shape, query.dtype, logits.scaling), None
        if query.dtype == self._held.keys.dtype and native.missing() is None:
            states = self._held.keys, self._held.values
            self._prepared = native.PreparedPlain(query, *states, self._bounds, logits.scaling)


@dataclass(frozen=True)
class InSegments:
    """Keys and values of all rows and KV heads, one segment after the other.

    Attributes:
        keys, values: `[total, dim]`.
        lengths: number of slots of each segment, row by row, then KV head by KV head.
        visible: `[rows, 1 or kv_heads, slots or more]` bool, the slots that hold a token; None = all.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    visible: Tensor | None = None

    @property
    def masks(self) -> "list[Tensor | None]":
        """The mask of each segment, `[1, 1, 1, tokens]`; None = all of its tokens are visible."""
        if self.visible is None:
            return [None] * len(self.lengths)
        rows = len(self.visible)
        visible = self.visible.expand(-1, len(self.lengths) // rows, -1).flatten(0, 1)
        return [mask[None, None, None, :length] for mask, length in zip(visible, self.lengths, strict=True)]

    def read(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """Attention of one query per row, see `in_place.Reader`.

        Each segment has its own product, and no key or value is copied.

        Args:
            query: `[batch, query_heads, 1, dim]`; `G` query heads share a KV head.
            mask: None; segments know what is visible.
        """
        rows, heads = query.shape[:2]
        # Four dimensions, because torch has a slower path for others.
        queries = query.reshape(len(self.lengths), 1, 1, -1, query.shape[-1]).unbind(0)  # per segment [1, 1, G, D]
        keys, values = self.keys[None, None].split(self.lengths, 2), self.values[None, None].split(self.lengths, 2)
        outputs, scale, group = [], logits.scaling, queries[0].shape[2]
        sinks = [None] * len(queries) if logits.sinks is None else [*logits.sinks.view(-1, group)] * rows
        masks = [None] * len(queries) if self.visible is None else self.masks
        for one, key, value, seen, sink in zip(queries, keys, values, masks, sinks, strict=True):
            if logits.softcap is None and sink is None:
                outputs.append(scaled_dot_product_attention(one, key, value, seen, scale=scale))
                continue
            bias = None if seen is None else torch.where(seen, 0.0, float("-inf"))
            of_segment = Logits(scale, logits.softcap, sink)
            outputs.append(join([read(one.transpose(1, 2), Part(key, value, bias), of_segment)], of_segment))
        return torch.cat(outputs).reshape(rows, 1, heads, -1).to(query.dtype)
