"""Storage that attention reads in the form in which it lies there, such as codes or segments.

A cache returns keys and values. Where attention can read the storage itself, the keys have no tokens and carry the
reader, so that every layer that attends to these keys finds it, also in compiled code.
"""

from collections.abc import Callable

from torch import Tensor

from .weights import Logits

#: Attention of one query per row, `[batch, 1, query_heads, dim]`, to a storage. Arguments: queries
#: `[batch, query_heads, 1, dim]`; a mask, bool or additive, that covers all slots, None = every token is visible, or
#: those that the storage knows to be; and how products become weights.
Reader = Callable[[Tensor, Tensor | None, Logits], Tensor]


def carry(keys: Tensor, reader: Reader) -> Tensor:
    """Keys without tokens, like `keys` `[batch, kv_heads, n, dim]`, that carry a reader."""
    carrier = keys[:, :, :0]
    carrier.reader = reader  # type: ignore[attr-defined]
    return carrier


def carried(keys: Tensor) -> Reader | None:
    """The reader that these keys carry; None = they are keys of tokens, or a copy of a carrier."""
    reader: Reader | None = getattr(keys, "reader", None)
    return reader
