"""What is done to keys before they are rounded, so that a few large channels do not take all levels for themselves."""

import torch
from torch import Tensor

from hf_paged_eviction.internals import LEVELS, Codec, Codes


class Balancer:
    """Rounds keys and values `[batch, kv_heads, n, dim]` to few bits, and reads them again.

    Args:
        bits: of every number.
    """

    def __init__(self, bits: int) -> None:
        self._codec = Codec(bits)

    def channels(self, queries: Tensor, keys: Tensor, real: Tensor | None) -> Tensor:
        """`[batch, kv_heads, 1, dim]` float32: by what the channels of a row's keys are divided, given the first of
        them.

        Args:
            queries: `[batch, query_heads, n, dim]` of the same tokens.
            keys: `[batch, kv_heads, n, dim]`.
            real: `[batch, n]` bool, False for pads; None = all real.
        """
        largest_query = _largest(queries.unflatten(1, (keys.shape[1], -1)), real).amax(2)
        # The paper multiplies keys by the root of (query / key), and so do we, by dividing by the inverse.
        factors = (_largest(keys, real) / largest_query).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(1e-4, 1e4)
        # To four binary digits, so that what is rounded does not depend on the last one.
        mantissa, exponent = factors.frexp()
        return ((mantissa * 16).round() / 16).ldexp(exponent)

    def encode(self, keys: Tensor, values: Tensor, channels: Tensor) -> tuple[Codes, Codes]:
        """Codes of keys and of values; `channels` as above."""
        return self._codec.encode(keys.float() / channels), self._codec.encode(values)

    def decode(
        self, codes: tuple[Codes, Codes], dims: tuple[int, int], dtype: torch.dtype, channels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they were rounded, `[batch, kv_heads, n, dims[0]]` and `[..., dims[1]]`."""
        values = self._codec.decode(codes[1], dims[1], dtype)
        return (self._codec.decode(codes[0], dims[0], torch.float32) * channels).to(dtype), values

    def shapes(self, keys: Tensor, values: Tensor, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the codes and levels of keys, then of values, for states like these."""
        shapes = []
        for like in (keys, values):
            packed, levels = self._codec.shapes(like, tokens)
            shapes += [(packed, self._codec.packed_dtype(like.dtype)), (levels, LEVELS)]
        return shapes


def _largest(states: Tensor, real: Tensor | None) -> Tensor:
    """`[..., 1, dim]` float32, the largest size of each channel over the tokens `[..., n, dim]`."""
    sizes = states.float().abs()
    if real is not None:
        hidden = ~real.view(len(real), *[1] * (states.ndim - 3), -1, 1)
        sizes = sizes.masked_fill(hidden, 0.0)
    return sizes.amax(-2, keepdim=True)
