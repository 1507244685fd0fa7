"""Tokens in few bits, as they lie in pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged_eviction.internals import LEVELS, Codec, packed_width

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
        widths: bytes of the parts of a head, by the order of `NAMES`.
        offsets: where they begin.
        head: bytes of a head.
        position: where the position begins, int32.
        words: words of `WORD` bytes of a record.
    """

    heads: int
    dim: int
    widths: tuple[int, ...]
    offsets: tuple[int, ...]
    head: int
    position: int
    words: int

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
        widths = packed_width(dim, keys), packed_width(dim, values), LEVELS.itemsize, LEVELS.itemsize
        levels = _up(sum(widths[:2]), LEVELS.itemsize)
        head = levels + sum(widths[2:])
        position = _up(heads * head, 4)
        offsets = 0, widths[0], levels, levels + widths[2]
        return cls(heads, dim, widths, offsets, head, position, words=_up(position + 4, WORD) // WORD)

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
