"""Keys or values in a few bits: rounded token by token, so that each can be moved, overwritten and read alone.

Of each token and head the smallest number and the distance of the levels are kept in float16, and for every number the
index of its level, several to a byte. Keys have a few channels that are far larger than the others, which would take
all levels for themselves. So channels that stand out in the first prompt are divided by a power of two, and keys are
turned by a fixed orthogonal matrix (as in QuaRot, arXiv 2404.00456), which spreads what is left over all channels.
Reading undoes both.
"""

from dataclasses import dataclass
from math import cos, pi, sin, sqrt
from numbers import Integral
from random import Random

import torch
from torch import Tensor

#: What `bits=` accepts, beside None.
BITS = (2, 4, 8)

#: With few levels it pays to cut off the ends: what share of the range the levels cover is chosen per token. On normal
#: numbers in 128 channels that makes a relative error of .36 at 2 bits, not .50; at 4 bits there is nothing to gain.
_SHARES = {2: (0.85, 0.7)}
#: Tokens, see `outliers`.
_ALIKE = 8
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Codes:
    """Encoded states of `n` tokens.

    Attributes:
        packed: `[batch, kv_heads, n, bytes]` uint8.
        levels: `[batch, kv_heads, n, 2]` float16: the lowest level and the distance between two.
    """

    packed: Tensor
    levels: Tensor


class Codec:
    """Rounds states `[batch, kv_heads, n, dim]` to `2**bits` levels per token and head.

    Args:
        bits: one of `BITS`; None = states stay as they are, which makes it possible to encode only keys or only values.
        turned: whether channels are mixed before.
    """

    def __init__(self, bits: int | None, turned: bool = False) -> None:
        self.bits = bits
        self.turned = turned and bits is not None
        self._turns: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bits}, turned={self.turned})"

    def shapes(self, like: Tensor, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `Codes.packed` and `Codes.levels` for `slots` tokens of states like these."""
        batch, heads, _, dim = like.shape
        width = dim if self.bits is None else -(-dim * self.bits // 8)
        return (batch, heads, slots, width), (batch, heads, slots, 0 if self.bits is None else 2)

    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of `Codes.packed`, for states of this type."""
        return dtype if self.bits is None else torch.uint8

    def encode(self, states: Tensor, channels: Tensor | None = None) -> Codes:
        """Round states of any floating type.

        Args:
            channels: `[batch, kv_heads, 1, dim]`, what each is divided by before it is turned.
        """
        if self.bits is None:
            return Codes(states, states.new_empty((*states.shape[:3], 0), dtype=torch.float16))
        numbers = states.to(torch.promote_types(states.dtype, torch.float32))
        if self.turned:
            numbers = numbers if channels is None else numbers / channels
            numbers = numbers @ self.turn(states.shape[-1], numbers.dtype, states.device)
        lowest, highest = numbers.aminmax(dim=-1, keepdim=True)
        middle, reach = (lowest + highest) / 2, (highest - lowest) / 2
        index, levels, error = self._round(numbers, lowest, 2 * reach)
        for share in _SHARES.get(self.bits, ()):
            other, other_levels, other_error = self._round(numbers, middle - share * reach, 2 * share * reach)
            better = other_error < 0.999 * error  # not by noise alone
            index, levels = torch.where(better, other, index), torch.where(better, other_levels, levels)
            error = torch.where(better, other_error, error)
        return Codes(pack(index.to(torch.uint8), self.bits), levels)

    def _round(self, numbers: Tensor, lowest: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, levels and squared errors per token with levels from `lowest` on."""
        most = 2 ** (self.bits or 0) - 1
        # What the rounding of the lowest level changes, the indices make up for.
        zero = lowest.clamp(-_LARGEST, _LARGEST).half()
        step = ((lowest + width - zero) / most).clamp(0, _LARGEST).half()
        per_step = torch.where(step > 0, step.to(numbers.dtype).reciprocal(), 0.0)
        index = ((numbers - zero) * per_step).round().clamp(0, most)
        error = torch.addcmul(zero.to(numbers.dtype), index, step.to(numbers.dtype)).sub(numbers).square()
        return index, torch.cat([zero, step], dim=-1), error.sum(-1, keepdim=True)

    def decode(self, codes: Codes, dim: int, dtype: torch.dtype, channels: Tensor | None = None) -> Tensor:
        """The rounded states `[batch, kv_heads, n, dim]`, in a tensor of their own; `channels` as for `encode`."""
        if self.bits is None:
            return codes.packed.clone()
        wide = torch.promote_types(dtype, torch.float32)
        zero, step = codes.levels.to(wide).split(1, dim=-1)
        numbers = torch.addcmul(zero, unpack(codes.packed, self.bits, dim, wide), step).to(dtype)
        if not self.turned:
            return numbers
        back = self.turn(dim, dtype, numbers.device).mT
        # Into the matrix rather than over all tokens.
        return numbers @ (back if channels is None else back * channels)

    def turn(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The matrix that mixes channels, `[dim, dim]`, orthogonal."""
        key = dim, dtype, device
        if key not in self._turns:
            with torch.inference_mode(False):
                self._turns[key] = mixing_matrix(dim).to(device=device, dtype=dtype)
        return self._turns[key]


def outliers(states: Tensor, real: Tensor | None) -> Tensor:
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


def pack(index: Tensor, bits: int) -> Tensor:
    """Indices `[..., dim]` uint8 below `2**bits` -> `[..., ceil(dim * bits / 8)]` uint8.

    The lowest bits of the bytes belong to the first part of the channels, the next bits to the next part.
    """
    parts = 8 // bits
    if parts == 1:
        return index
    width = -(-index.shape[-1] // parts)
    index = torch.nn.functional.pad(index, (0, width * parts - index.shape[-1])).unflatten(-1, (parts, width))
    packed = index[..., 0, :]
    for part in range(1, parts):
        packed = packed | (index[..., part, :] << (bits * part))
    return packed


def unpack(packed: Tensor, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    """What `pack` packed, `[..., dim]`, as floating numbers."""
    parts = 8 // bits
    if parts == 1:
        return packed.to(dtype)
    mask = 2**bits - 1
    index = torch.cat([(packed >> (bits * part)) & mask for part in range(parts)], dim=-1)
    return index[..., :dim].to(dtype)


def mixing_matrix(dim: int) -> Tensor:
    """`[dim, dim]` float64, orthogonal, the same on every machine: random signs, then a Hadamard matrix of the largest
    power of two in `dim` times (Kronecker) a Hartley matrix of the odd rest, so that every channel reaches all."""
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    angles = [[2 * pi * (row * column % odd) / odd for column in range(odd)] for row in range(odd)]
    matrix = torch.tensor([[cos(angle) + sin(angle) for angle in row] for row in angles], dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < dim:
        matrix = torch.kron(pair, matrix)
    draw = Random(dim)
    signs = torch.tensor([draw.choice((-1.0, 1.0)) for _ in range(dim)], dtype=torch.float64)
    return signs[:, None] * matrix / sqrt(dim)


def check_bits(bits: object) -> tuple[int | None, int | None]:
    """Bits of keys and of values from what a user gave.

    Raises:
        TypeError, ValueError: it is no number of bits and no pair of them.
    """
    pair = tuple(bits) if isinstance(bits, tuple | list) else (bits, bits)
    if len(pair) != 2:
        raise ValueError(f"bits= is one number for keys and values, or a pair (keys, values), got {bits!r}.")
    for given in pair:
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, Integral):
            raise TypeError(f"bits= counts bits and must be one of {BITS}, None or a pair of these, got {bits!r}.")
        if given not in BITS:
            raise ValueError(f"bits= must be one of {BITS}, None (the model's type) or a pair of these, got {bits!r}.")
    return pair[0], pair[1]
