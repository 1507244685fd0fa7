"""Attention of single queries to keys and values in segments of different length, without a padded copy."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..cpu.library import library, missing
from .parts import Part, join, read
from .weights import Logits


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


class SegmentsReader:
    """`InSegments.read`, by a prepared call of the function in C where that can be; a `Reader`.

    If `InSegments.visible` is given, the tokens of each segment are its last slots, because a row or head with room
    left fills its lowest slots last. What is written to it counts.

    Args:
        held: the segments.
        bounds: see `Segments`.
    """

    def __init__(self, held: InSegments, bounds: tuple[Tensor, Tensor]) -> None:
        self._held, self._bounds = held, bounds
        self._prepared: Prepared | None = None
        self._kind: tuple[object, ...] | None = None
        parts = held.keys, held.values, *bounds
        kind = held.keys.dtype == held.values.dtype and held.keys.dtype in (torch.float32, torch.bfloat16)
        self._may = kind and all([part.is_cpu and part.is_contiguous() for part in parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentsReader, (self._held, self._bounds)

    def __call__(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        plain = self._may and not torch.compiler.is_compiling() and not query.requires_grad
        if plain and logits.softcap is None and logits.sinks is None:
            kind = query.shape, query.dtype, logits.scaling
            if kind != self._kind:
                self._prepare(query, logits)
                self._kind = kind
            if self._prepared is not None:
                if self._held.visible is not None:
                    starts, lengths = self._used
                    torch.minimum(self._bounds[1], self._held.visible.sum(-1), out=lengths)
                    torch.sub(self._ends, lengths, out=starts)
                return self._prepared(query)
        return self._held.read(query, mask, logits)

    def _prepare(self, query: Tensor, logits: Logits) -> None:
        keys, values, (starts, lengths) = self._held.keys, self._held.values, self._bounds
        can, self._ends = query.dtype == keys.dtype and missing() is None, starts + lengths
        self._used = self._bounds if self._held.visible is None else (starts.clone(), lengths.clone())
        self._prepared = Prepared(query, keys, values, self._used, logits.scaling) if can else None


class _Plain(ctypes.Structure):
    """`Plain` of `attend.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "starts", "lengths", "output")),
        *((name, ctypes.c_int64) for name in ("sets", "group", "key_dim", "value_dim", "narrow")),
        ("scaling", ctypes.c_double),
    ]


class Prepared:
    """Attention of single queries to segments of keys and values by the function in C, for any number of queries like
    this one. It is valid as long as no tensor is replaced; what is written to them counts.

    Args:
        query: `[rows, query_heads, 1, dim]`, such as will come.
        keys, values: `[total, dim]`, float32 or bfloat16, contiguous, of the dtype of the queries.
        bounds: first slots and lengths of the segments, `[rows, heads]` each, contiguous; other slots are not read.
        scaling: of logits.

    Raises:
        RuntimeError: the function is `missing`.
    """

    def __init__(
        self, query: Tensor, keys: Tensor, values: Tensor, bounds: tuple[Tensor, Tensor], scaling: float
    ) -> None:
        sets, self._kept = bounds[0].numel(), (keys, values, *bounds)
        pointers = None, *(part.data_ptr() for part in self._kept), None
        narrow, dims = keys.dtype == torch.bfloat16, (keys.shape[-1], values.shape[-1])
        self._call = _Plain(*pointers, sets, query.shape[0] * query.shape[1] // sets, *dims, narrow, scaling)
        self._attend, self._at = library().attend_plain, ctypes.byref(self._call)
        self._shape, self._dtype = (query.shape[0], 1, query.shape[1], dims[1]), query.dtype

    def __call__(self, query: Tensor) -> Tensor:
        """Attention of these queries, `[rows, 1, query_heads, dim]`."""
        wide = (query if self._dtype == torch.float32 else query.float()).contiguous()
        output, call = wide.new_empty(self._shape), self._call
        call.query, call.output = wide.data_ptr(), output.data_ptr()
        self._attend(self._at)
        return output if self._dtype == torch.float32 else output.to(self._dtype)
