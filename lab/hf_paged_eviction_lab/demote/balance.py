"""What is done to keys before they are rounded, so that a few large channels do not take all levels for themselves."""

from typing import Literal

import torch
from torch import Tensor

from hf_paged_eviction.internals import LEVELS, Codec, Codes

#: See `Demote`.
Balance = Literal["rotation", "queries", "none"]
#: Tokens, see `_outliers`.
_ALIKE = 8
_LARGEST = torch.finfo(torch.float16).max

BALANCES: tuple[Balance, ...] = ("rotation", "queries", "none")


class Balancer:
    """Rounds keys and values `[batch, kv_heads, n, dim]` to few bits, and reads them again.

    Args:
        bits: of every number.
        balance: of keys. Values are rounded as they are.
    """

    def __init__(self, bits: int, balance: Balance) -> None:
        self.balance = balance
        self._keys, self._values = Codec(bits, turned=balance == "rotation"), Codec(bits)

    def channels(self, queries: Tensor, keys: Tensor, real: Tensor | None) -> Tensor:
        """`[batch, kv_heads, 1, dim]` float32: by what the channels of a row's keys are divided, given the first of
        them.

        Args:
            queries: `[batch, query_heads, n, dim]` of the same tokens.
            keys: `[batch, kv_heads, n, dim]`.
            real: `[batch, n]` bool, False for pads; None = all real.
        """
        if self.balance == "rotation":
            return _outliers(keys, real).float()
        if self.balance == "none":
            return torch.ones_like(keys[:, :, :1], dtype=torch.float32)
        largest_query = _largest(queries.unflatten(1, (keys.shape[1], -1)), real).amax(2)
        # The paper multiplies keys by the root of (query / key), and so do we, by dividing by the inverse.
        factors = (_largest(keys, real) / largest_query).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(1e-4, 1e4)
        # To four binary digits, so that what is rounded does not depend on the last one.
        mantissa, exponent = factors.frexp()
        return ((mantissa * 16).round() / 16).ldexp(exponent)

    def encode(self, keys: Tensor, values: Tensor, channels: Tensor) -> tuple[Codes, Codes]:
        """Codes of keys and of values; `channels` as above."""
        return self._keys.encode(keys.float() / channels), self._values.encode(values)

    def decode(
        self, codes: tuple[Codes, Codes], dims: tuple[int, int], dtype: torch.dtype, channels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they were rounded, `[batch, kv_heads, n, dims[0]]` and `[..., dims[1]]`."""
        values = self._values.decode(codes[1], dims[1], dtype)
        return (self._keys.decode(codes[0], dims[0], torch.float32) * channels).to(dtype), values

    def shapes(self, keys: Tensor, values: Tensor, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the codes and levels of keys, then of values, for states like these."""
        shapes = []
        for codec, like in ((self._keys, keys), (self._values, values)):
            packed, levels = codec.shapes(like, tokens)
            shapes += [(packed, codec.packed_dtype(like.dtype)), (levels, LEVELS)]
        return shapes


def _largest(states: Tensor, real: Tensor | None) -> Tensor:
    """`[..., 1, dim]` float32, the largest size of each channel over the tokens `[..., n, dim]`."""
    sizes = states.float().abs()
    if real is not None:
        hidden = ~real.view(len(real), *[1] * (states.ndim - 3), -1, 1)
        sizes = sizes.masked_fill(hidden, 0.0)
    return sizes.amax(-2, keepdim=True)


def _outliers(states: Tensor, real: Tensor | None) -> Tensor:
    """By what channels that stand out are to be divided: the power of two nearest to their size, that of the middle
    channel being 1; 1 for all others. A power of two is exact, and does not depend on the last digit.

    Args:
        states: `[batch, kv_heads, n, dim]`.
        real: `[batch, n]` bool, False for pads; None = all real.

    Returns:
        `[batch, kv_heads, 1, dim]` in the type of the states.
    """
    squares = states.to(torch.promote_types(states.dtype, torch.float32)).square()
    count = torch.full_like(squares[:, :1, :1, :1], states.shape[2])
    if real is not None:
        squares = squares * real[:, None, :, None]
        count = real.sum(-1)[:, None, None, None].to(squares.dtype).clamp_min(1)
    sums = squares.sum(2, keepdim=True)
    # Few tokens say little: as many more are added in which all channels are alike.
    sums = sums + _ALIKE * sums.median(-1, keepdim=True).values / count
    ratio = (sums / sums.median(-1, keepdim=True).values).nan_to_num(1.0, 1.0).clamp(1, _LARGEST)
    return (ratio.log2() / 2).round().exp2().to(states.dtype)
