"""Rounds keys or values to few bits, token by token, so that each token can be moved, overwritten and read alone.

For each token and head, the distance between levels is stored in bfloat16, and for each number the index of its level,
several per byte. The levels are symmetric around zero. Keys have a large constant part, which would use up most levels.
So the mean of a row's first keys, rotated to the position of the token, is subtracted before. In the rest, some
channels are larger than others, and queries are mostly small where keys are large. So each channel is divided by the
root of its size, which balances the error. A fixed orthogonal matrix then mixes the channels (as in QuaRot, arXiv
2404.00456), so that no channel stands out and their mean is near zero. Decoding undoes all steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import cos, log, pi, sin, sqrt
from numbers import Integral
from random import Random

import torch
from torch import Tensor

from ..integration.rotary import Rotary
from ..store.exact import RowStatistics
from ..tensors.graphs import static

#: Values of `bits=`, besides None.
BITS = (2, 3, 4, 8)
#: Rises when older codes cannot be read. Saved contexts have this number.
FORMAT = 6
#: Dtype of the distance between levels, with the range of float32.
LEVELS = torch.bfloat16

#: With few levels it pays to cut off the ends: what share of the range the levels cover is chosen per token. Of heads
#: of so many channels; of more the largest lies further out, and the shares are less.
_CHANNELS = 64
_SHARES = {2: (0.85, 0.7), 3: (0.9, 0.8), 4: (0.95, 0.9)}
#: So many tokens are rounded in all ways at once; of more the copies would take too much memory.
_TOGETHER = 64
#: Tokens that count as having channels of equal size, added to the tokens whose sizes are known: few tokens say little.
_ALIKE = 16
#: Bound that keeps sums and differences finite.
_LARGEST = torch.finfo(LEVELS).max / 8


@dataclass(frozen=True)
class Codes:
    """Encoded states of `n` tokens.

    Attributes:
        packed: `[batch, kv_heads, n, bytes]` uint8.
        levels: `[batch, kv_heads, n, 1]` bfloat16, the distance between two levels.
    """

    packed: Tensor
    levels: Tensor


class Codec:
    """Rounds states `[batch, kv_heads, n, dim]` to `2**bits` levels per token and head.

    Attributes:
        centred: whether a mean is subtracted and channels are divided by their sizes.

    Args:
        bits: one of `BITS`; None = do not round, so that only keys or only values are encoded.
        turned: whether channels are mixed by the orthogonal matrix.
        centred: see above.
        rotary: rotary embedding of these states; None = none, or not known.
    """

    def __init__(
        self, bits: int | None, turned: bool = False, centred: bool = False, rotary: Rotary | None = None
    ) -> None:
        self.bits = bits
        self.turned = turned and bits is not None
        self.centred = centred and bits is not None
        self.rotary = rotary if self.centred else None
        self._turns: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bits}, turned={self.turned})"

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for codecs that make the same codes of the same states. Codecs of another package may differ in
        anything."""
        return (self.bits, self.turned, self.centred, id(self.rotary)) if type(self) is Codec else (id(self),)

    def alike(self, other: "Codec") -> bool:
        """Whether both make the same codes of the same states."""
        return self.kind == other.kind

    def shapes(self, like: Tensor, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of `Codes.packed` and `Codes.levels` for `slots` tokens of states like these."""
        batch, heads, _, dim = like.shape
        width = dim if self.bits is None else packed_width(dim, self.bits)
        return (batch, heads, slots, width), (batch, heads, slots, 0 if self.bits is None else 1)

    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of `Codes.packed` for states of this dtype."""
        return dtype if self.bits is None else torch.uint8

    def row_statistics(self, states: Tensor, positions: Tensor, real: Tensor | None) -> RowStatistics:
        """Compute mean and sizes of rows that begin with these states; same arguments as `mean`."""
        mean = self.mean(states, positions, real)
        return RowStatistics(mean, self.sizes(states, self._offset(mean, positions[:, None, :, None]), real))

    def mean(self, states: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        """Compute the mean to subtract in rows that begin with these states, `[batch, kv_heads, 1, dim]`, before rotary
        embedding. It is rounded, so that it does not depend on the last bits of the states.

        Args:
            positions: `[batch, n]` positions of the tokens.
            real: `[batch, 1 or kv_heads, n]` bool, False for pads, which may be anything; None = all real.
        """
        numbers = states.to(torch.promote_types(states.dtype, torch.float32))
        if self.rotary is not None:
            numbers = self.rotary.unrotate(numbers, positions[:, None])
        if real is None:
            mean = numbers.mean(2, keepdim=True)
        else:
            numbers, count = _only(numbers, real)
            mean = numbers.sum(2, keepdim=True) / count.clamp_min(1)
        return mean.clamp(-_LARGEST, _LARGEST).to(LEVELS).to(states.dtype)

    def sizes(self, states: Tensor, offset: Tensor | None, real: Tensor | None) -> Tensor:
        """Compute the divisors of the channels in rows that begin with these states, `[batch, kv_heads, 1, dim]`,
        positive, about 1: the root of the relative size of each channel. Rounded like `mean`.

        Args:
            offset: the mean to subtract before; None = nothing.
            real: see `mean`.
        """
        numbers, count = _less(states, offset), states.new_full((1, 1, 1, 1), states.shape[2])
        if real is not None:
            numbers, count = _only(numbers, real)
        most = numbers.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(numbers.dtype).tiny)
        sums = (numbers / most).square().sum(2, keepdim=True)  # dividing first keeps the squares finite
        whole = sums.mean(-1, keepdim=True)
        shares = torch.where(whole > 0, sums / whole, 1.0)
        return ((count * shares + _ALIKE) / (count + _ALIKE)).pow(0.25).to(LEVELS).to(states.dtype)

    def _offset(self, mean: Tensor, positions: Tensor) -> Tensor:
        """What is subtracted from tokens, `[batch, kv_heads, 1 or n, dim]`; the rest as for `encode`."""
        return mean if self.rotary is None else self.rotary.rotate(mean, positions[..., 0])

    def encode(
        self, states: Tensor, row_statistics: RowStatistics | None = None, positions: Tensor | None = None
    ) -> Codes:
        """Encode states of any floating-point dtype.

        Args:
            row_statistics: statistics of the rows, if the codec is centred.
            positions: `[batch, 1 or kv_heads, n, 1]` positions of the tokens, if the codec has a `rotary`; else any
                tensor.
        """
        if self.bits is None:
            return Codes(states, states.new_empty((*states.shape[:3], 0), dtype=LEVELS))
        if self.centred and row_statistics is not None and positions is not None:
            numbers = _less(states, self._offset(row_statistics.mean, positions)) / row_statistics.sizes
        else:
            numbers = _less(states, None)
        if self.turned:
            numbers = numbers @ self.turn(states.shape[-1], numbers.dtype, states.device)
        reach = numbers.abs().amax(-1, keepdim=True)
        less = min(1.0, sqrt(log(_CHANNELS) / log(max(states.shape[-1], 2))))
        tries = self._tries(numbers, [reach, *(less * share * reach for share in _SHARES.get(self.bits, ()))])
        index, levels, error = next(tries)
        for other, other_levels, other_error in tries:
            better = other_error < 0.999 * error  # by more than noise
            index, levels = torch.where(better, other, index), torch.where(better, other_levels, levels)
            error = torch.where(better, other_error, error)
        return Codes(pack(index.to(torch.uint8), self.bits), levels)

    def _tries(self, numbers: Tensor, reaches: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """What `_round` makes of numbers `[batch, kv_heads, n, dim]` with each of these reaches: few tokens, which cost
        what their operators cost, with all of them at once."""
        if numbers.shape[2] > _TOGETHER:
            return (self._round(numbers, reach) for reach in reaches)
        return zip(*(part.unbind() for part in self._round(numbers, torch.stack(reaches))), strict=True)

    @property
    def middle(self) -> float:
        """Zero, as an index."""
        return ((1 << (self.bits or 0)) - 1) / 2

    def _round(self, numbers: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, distances and squared errors per token with levels from `-reach` to `reach`."""
        levels = (reach / self.middle).to(LEVELS)
        step = levels.to(numbers.dtype)
        per_step = torch.where(levels > 0, step.reciprocal(), 0.0)
        index = (numbers * per_step + self.middle).round().clamp(0, 2 * self.middle)
        error = ((index - self.middle) * step).sub(numbers).square()
        return index, levels, error.sum(-1, keepdim=True)

    def decode(
        self,
        codes: Codes,
        dim: int,
        dtype: torch.dtype,
        row_statistics: RowStatistics | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Decode to states `[batch, kv_heads, n, dim]`, in a new tensor; other arguments as in `encode`."""
        if self.bits is None:
            return codes.packed.clone()
        wide = torch.promote_types(dtype, torch.float32)
        numbers = ((unpack(codes.packed, self.bits, dim, wide) - self.middle) * codes.levels.to(wide)).to(dtype)
        if self.turned:
            numbers = numbers @ self.turn(dim, dtype, numbers.device).mT
        if self.centred and row_statistics is not None and positions is not None:
            numbers = numbers.mul_(row_statistics.sizes).add_(self._offset(row_statistics.mean, positions))
        return numbers

    def turn(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The orthogonal matrix that mixes channels, `[dim, dim]`."""
        key = dim, dtype, device
        if key not in self._turns:
            with torch.inference_mode(False):
                self._turns[key] = static(mixing_matrix(dim).to(device=device, dtype=dtype))
        return self._turns[key]


def _less(states: Tensor, offset: Tensor | None) -> Tensor:
    """In float32 or wider, and finite."""
    numbers = states.to(torch.promote_types(states.dtype, torch.float32))
    return (numbers if offset is None else numbers - offset).clamp(-_LARGEST, _LARGEST)


def _only(numbers: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers `[batch, kv_heads, n, dim]` with zeros for pads, see `Codec.mean`; and how many are left, `[batch, 1 or
    kv_heads, 1, 1]`."""
    return numbers.masked_fill(~real[..., None], 0.0), real.sum(-1)[..., None, None].to(numbers.dtype)


@cache
def packed_width(dim: int, bits: int) -> int:
    """Number of bytes for so many indices."""
    return sum(-(-dim * plane // 8) for plane in _PLANES[bits])


#: Three bits are two and one: a plane of each, one behind the other.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def pack(index: Tensor, bits: int) -> Tensor:
    """Pack indices `[..., dim]` uint8 below `2**bits` to `[..., packed_width(dim, bits)]` uint8."""
    planes, lower = [], 0
    for plane in _PLANES[bits]:
        planes.append(_pack_plane(index >> lower if lower else index, plane))
        lower += plane
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(packed: Tensor, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Undo `pack`: indices `[..., dim]` as floating-point numbers."""
    total = None
    for factor, parts in planes_of(packed, bits, dim):
        plane = parts[0].to(dtype) if len(parts) == 1 else _side_by_side(parts, dim, dtype)
        total = plane if total is None else total.add_(plane, alpha=factor)
    if total is None:
        raise ValueError(f"bits must be one of {BITS}, got {bits}.")
    return total


def _side_by_side(parts: list[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """Their channels one behind the other, the first `dim` of them; converted while they are written, once."""
    *shape, width = parts[0].shape
    plane = torch.empty((*shape, len(parts), width), dtype=dtype, device=parts[0].device)
    for target, part in zip(plane.unbind(-2), parts, strict=True):
        target.copy_(part)
    plane = plane.flatten(-2)
    return plane if plane.shape[-1] == dim else plane[..., :dim]


def _pack_plane(index: Tensor, bits: int) -> Tensor:
    """The lowest bits of indices. Those of the bytes belong to the first part of the channels, the next to the next."""
    parts = 8 // bits
    if parts == 1:
        return index
    width = -(-index.shape[-1] // parts)
    index = index & (2**bits - 1)
    index = torch.nn.functional.pad(index, (0, width * parts - index.shape[-1])).unflatten(-1, (parts, width))
    packed = index[..., 0, :]
    for part in range(1, parts):
        packed = packed | (index[..., part, :] << (bits * part))
    return packed


def planes_of(packed: Tensor, bits: int, dim: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Undo `pack` plane by plane: the weight of a plane, and its indices for each part of the channels, `[..., width]`
    uint8."""
    start = lower = 0
    for plane in _PLANES[bits]:
        parts = 8 // plane
        width = -(-dim // parts)
        held = packed if width == packed.shape[-1] else packed.narrow(-1, start, width)
        # The lowest bits need no shift, the highest no mask.
        shifted = [held, *(held >> (plane * part) for part in range(1, parts))]
        yield 2**lower, [part & (2**plane - 1) for part in shifted[:-1]] + shifted[-1:]
        start, lower = start + width, lower + plane


def mixing_matrix(dim: int) -> Tensor:
    """`[dim, dim]` float64, orthogonal, the same on every machine: random signs, then a Hadamard matrix of the largest
    power of two in `dim` times (Kronecker) a Hartley matrix of the odd rest, so that every channel reaches all."""
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    angles = [[2 * pi * (row * column % odd) / odd for column in range(odd)] for row in range(odd)]
    matrix = torch.tensor(
        [[cos(angle) + sin(angle) for angle in row] for row in angles], dtype=torch.float64, device="cpu"
    )
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    while matrix.shape[0] < dim:
        matrix = torch.kron(pair, matrix)
    draw = Random(dim)
    signs = torch.tensor([draw.choice((-1.0, 1.0)) for _ in range(dim)], dtype=torch.float64, device="cpu")
    return signs[:, None] * matrix / sqrt(dim)


def check_bits(bits: object) -> tuple[int | None, int | None]:
    """Parse bits of keys and of values.

    Raises:
        TypeError, ValueError: `bits` is neither a number of bits nor a pair.
    """
    pair = tuple(bits) if isinstance(bits, tuple | list) else (bits, bits)
    if len(pair) != 2:
        raise ValueError(f"bits= is one number for keys and values, or a pair (keys, values), got {bits!r}.")
    for count in pair:
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"bits= counts bits and must be one of {BITS}, None or a pair of these, got {bits!r}.")
        if count not in BITS:
            raise ValueError(f"bits= must be one of {BITS}, None (the model's type) or a pair of these, got {bits!r}.")
    return pair[0], pair[1]
