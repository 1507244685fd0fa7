"""Tokens in few bits, as they lie in pages."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..precision.codec import LEVELS, Codec, packed_width

#: Columns of `FewBits`, those of keys and values in the order of a record.
NAMES = "key_codes", "value_codes", "key_levels", "value_levels"
#: Records begin at multiples of so many bytes.
WORD = 8


@dataclass(frozen=True)
class RecordLayout:
    """The bytes of one token of some KV heads: for each head the codes of key and value and the distances between their
    levels, then the position.

    Attributes:
        heads: number of KV heads.
        dim: head size.
        bits: bits of keys and of values.
    """

    heads: int
    dim: int
    bits: tuple[int, int]

    @classmethod
    def of(cls, codecs: tuple[Codec, Codec], heads: int, dim: int) -> "RecordLayout":
        """The records that these codecs make.

        Raises:
            ValueError: the codecs do not round keys and values to few bits, or are of another package.
        """
        keys, values = (codec.bits if type(codec) is Codec else None for codec in codecs)
        if keys is None or values is None:
            raise ValueError(
                f"Continuous batching does not support bits={(keys, values)}: pages hold keys and values in 8, 4, 3 or "
                "2 bits, or both in the model's type. Give bits= for both, leave it out, or use "
                "PagedEvictionCache(..., bits=...) with generate."
            )
        return cls(heads, dim, (keys, values))

    @cached_property
    def widths(self) -> tuple[int, int, int, int]:
        """Bytes of the parts of a head, by the order of `NAMES`."""
        keys, values = (packed_width(self.dim, bits) for bits in self.bits)
        return keys, values, LEVELS.itemsize, LEVELS.itemsize

    @cached_property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where they begin."""
        keys, values, *_ = self.widths
        levels = _up(keys + values, LEVELS.itemsize)
        return 0, keys, levels, levels + LEVELS.itemsize

    @cached_property
    def head(self) -> int:
        """Bytes of a head."""
        return self.offsets[-1] + self.widths[-1]

    @cached_property
    def position(self) -> int:
        """Where the position begins, int32."""
        return _up(self.heads * self.head, 4)

    @cached_property
    def words(self) -> int:
        """Words of `WORD` bytes of a record."""
        return _up(self.position + 4, WORD) // WORD

    def per_page(self, page_size: int, item_size: int) -> int:
        """Number of records in a set's part of a page for `page_size` tokens with numbers of `item_size` bytes."""
        return 2 * page_size * self.heads * self.dim * item_size // (self.words * WORD)

    def pack(self, columns: dict[str, Tensor]) -> Tensor:
        """Records `[B, S, n, words]` int64 of columns `[B, S * heads, n, ...]` of `FewBits`."""
        codes, positions = columns["key_codes"], columns["positions"]
        rows, heads, count, _ = codes.shape
        shape = rows, heads // self.heads, self.heads, count
        packed = codes.new_zeros((rows, shape[1], count, self.words * WORD))
        of_heads = packed[..., : self.heads * self.head].unflatten(-1, (self.heads, self.head)).transpose(2, 3)
        for name, start, width in zip(NAMES, self.offsets, self.widths, strict=True):
            of_heads[..., start : start + width] = columns[name].contiguous().view(torch.uint8).view(*shape, width)
        of_set = positions[:, :: self.heads] if positions.shape[1] == heads else positions
        places = packed[..., self.position : self.position + 4]
        places.copy_(of_set.int().contiguous().view(torch.uint8).expand_as(places))
        return packed.view(torch.int64)

    def unpack(self, records: Tensor) -> dict[str, Tensor]:
        """Undo `pack`; positions are `[B, S, n, 1]`."""
        packed = records.contiguous().view(torch.uint8)
        of_heads = packed[..., : self.heads * self.head].unflatten(-1, (self.heads, self.head)).transpose(2, 3)
        parts = {
            name: of_heads[..., start : start + width].flatten(1, 2).contiguous()
            for name, start, width in zip(NAMES, self.offsets, self.widths, strict=True)
        }
        positions = packed[..., self.position : self.position + 4].contiguous().view(torch.int32)
        levels = {name: parts[name].view(LEVELS) for name in NAMES[2:]}
        return {**parts, **levels, "positions": positions}


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
