"""Attention of a chunk to what was held before it, which all of its queries see, and to itself.

Where that is known, no mask has to be made: each KV head is read as far as it reaches, the chunk causally, and the two
outputs are joined by the sums of their exponentials, which the kernel of torch for CPUs returns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = torch.float32, torch.bfloat16, torch.float16
#: A private operator of torch, the only one for CPUs that returns the logarithms of sums of exponentials.
_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


@dataclass(frozen=True)
class InOrder:
    """What the queries of a chunk see of keys `[rows, kv_heads, held + new, dim]`: of the first `held` the first
    `lengths`, and of the `new` ones those up to themselves.

    Attributes:
        held, new: see above.
        lengths: by row and KV head; None = all of the held ones.
    """

    held: int
    new: int
    lengths: list[int] | None = None

    def mask(self, key: Tensor, queries: int) -> Tensor:
        """`[rows, 1 or kv_heads, queries, held + new]` bool, for the last queries."""
        slots = torch.arange(self.held + self.new, device=key.device)
        last = self.held + torch.arange(self.new - queries, self.new, device=key.device)
        seen = (slots <= last[:, None])[None, None]
        if self.lengths is None:
            return seen.expand(key.shape[0], -1, -1, -1)
        lengths = torch.tensor(self.lengths, device=key.device).view(*key.shape[:2], 1, 1)
        return seen & ((slots < lengths) | (slots >= self.held))

    def readable(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether `read` can."""
        fits = query.shape[2] == self.new and query.dtype == key.dtype == value.dtype and key.dtype in _DTYPES
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        return _FLASH is not None and fits and key.is_cpu and key.shape[-1] == value.shape[-1] and not grad

    def read(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """The output `[rows, new, query_heads, dim]`, and the logarithms of the sums of exponentials of the logits,
        `[rows, query_heads, new]` float32."""
        rows, heads, count, dim = query.shape
        sets, held = key.shape[1], self.held
        own = [states[:, :, held:].repeat_interleave(heads // sets, 1) for states in (key, value)]
        output, lse = _FLASH(query, *own, is_causal=True, scale=scaling)
        # Query heads that share a KV head are its queries.
        packed = query.reshape(rows, sets, -1, dim)
        if self.lengths is None:
            before, its = _FLASH(packed, key[:, :, :held], value[:, :, :held], scale=scaling)
        else:
            before, its = torch.empty_like(packed), packed.new_empty(packed.shape[:3], dtype=torch.float32)
            for at, length in enumerate(self.lengths):
                row, head = divmod(at, sets)
                place = slice(row, row + 1), slice(head, head + 1)
                states = (states[place][:, :, :length] for states in (key, value))
                before[place], its[place] = _FLASH(packed[place], *states, scale=scaling)
        its = its.reshape(rows, heads, count)
        share = (lse - its).sigmoid()[..., None]
        before = before.reshape(rows, heads, count, dim)
        joined = torch.lerp(before.float(), output.float(), share).to(query.dtype)
        return joined.transpose(1, 2).contiguous(), lse.logaddexp(its)


def note(key: Tensor, order: InOrder) -> None:
    """Note it on keys; a copy of them does not have it."""
    key.in_order = order  # type: ignore[attr-defined]


def noted(key: Tensor) -> InOrder | None:
    """What was noted."""
    return getattr(key, "in_order", None)
