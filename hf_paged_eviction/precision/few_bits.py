"""Tokens in few bits."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..attention.in_place import Reader
from ..integration.rotary import Rotary
from ..store.coders import BOTH, KeysValues, Visible
from ..store.columns import Columns, States
from ..store.exact import Exact
from . import fused
from .codec import LEVELS, Codec, Codes
from .decoding import Decoder
from .in_codes import InCodes, fuses

#: This many protected first tokens are not rounded, because models attend to them more than to any others. On SmolLM2
#: more of them change nothing; rounding them too costs three times as much as rounding all other tokens.
FIRST = 4
#: Rows x KV heads x slots: up to this number, decoding is faster in eager mode than reading codes by torch operators.
FEW = 768
#: The names of columns begin so.
_PARTS = "key", "value"


class FewBits:
    """Codes of keys and of values; see `Coder`.

    The first `FIRST` tokens of a row (if they are protected) and its newest `block_size` tokens are not rounded, as
    long as they are held. The choice depends only on the real tokens of the row, not on the batch.

    If the mean that a codec subtracts depends on the position, the positions of the tokens are stored with their codes.

    Attributes:
        codecs: codecs of keys and of values.

    Args:
        codecs: see above.
        block_size, protected: number of tokens per block, and of protected tokens.
        separate: whether each KV head holds its own tokens.
    """

    rounds = True
    rerotation: Rotary | None = None

    def __init__(self, codecs: tuple[Codec, Codec], block_size: int, protected: int, separate: bool = False) -> None:
        self.codecs = codecs
        self._newest, self._first, self._separate = block_size, min(protected, FIRST), separate

    def kinds(self, keys: Tensor, values: Tensor) -> tuple[dict[str, Tensor], Exact]:
        """See `Coder.kinds`: codes and levels, and positions `[batch, sets, 0, 0 or 1]`."""
        columns = {}
        for part, codec, like in zip(_PARTS, self.codecs, (keys, values), strict=True):
            packed, levels = codec.shapes(like, 0)
            columns[f"{part}_codes"] = like.new_empty(packed, dtype=codec.packed_dtype(like.dtype))
            columns[f"{part}_levels"] = like.new_empty(levels, dtype=LEVELS)
            if codec.rotary is not None:
                codec.rotary.prepare(like.device)  # as the next, for graphs, which cannot do so
        fused.prepare(keys.device)
        columns["positions"] = self._placed(keys.new_empty(*keys.shape[:2], 0, dtype=torch.int32))
        return columns, Exact.kind(keys, values, self._newest, self._first)

    def _placed(self, positions: Tensor) -> Tensor:
        """The column of `positions` `[batch, kv_heads, n]`."""
        rotates = any(codec.rotary is not None for codec in self.codecs)
        sets = positions if self._separate else positions[:, :1]
        return sets[..., None][..., : int(rotates)].to(torch.int32)

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, exact: Exact | None = None
    ) -> dict[str, Tensor]:
        """See `Coder.encode`."""
        if positions is None or exact is None:
            raise RuntimeError("Tokens that are rounded come with their positions.")
        columns = {}
        for part, codec, states, statistics in zip(
            _PARTS, self.codecs, (keys, values), exact.row_statistics(), strict=True
        ):
            codes = codec.encode(states, statistics, positions[..., None])
            columns[f"{part}_codes"], columns[f"{part}_levels"] = codes.packed, codes.levels
        return {**columns, "positions": self._placed(positions.expand(*keys.shape[:2], -1))}

    def decode(self, columns: States, exact: Exact | None) -> KeysValues:
        """See `Coder.decode`; always new tensors."""
        return self._decode(0, columns, exact), self._decode(1, columns, exact)

    def read(self, columns: Columns, held: int | None, reads: Sequence[str] = BOTH) -> KeysValues:
        """See `Coder.read`; always new tensors."""
        exact, held = columns.beside, columns.shape[2] if held is None else held
        read = [
            self._read(place, columns, held) if name in reads else like.new_empty(*like.shape[:2], held, 0)
            for place, (name, like) in enumerate(zip(BOTH, (exact.keys, exact.values), strict=True))
        ]
        if held:
            exact.write_over(*[states if name in reads else None for name, states in zip(BOTH, read, strict=True)])
        return read[0], read[1]

    def _read(self, place: int, columns: Columns, held: int) -> Tensor:
        """Keys (`place` 0) or values (1), without what is not rounded."""
        decoder: Decoder | None = None
        if not torch.compiler.is_compiling():  # Dynamo cannot trace how a call in C is prepared
            if place not in columns.decoders:
                columns.decoders[place] = self._decoder(place, columns)
            decoder = columns.decoders[place]
        return self._decode(place, columns.first(held), columns.beside) if decoder is None else decoder(held)

    def _decoder(self, place: int, columns: Columns) -> Decoder | None:
        """The function in C for these columns; None = it cannot read them, or is missing."""
        exact, part, codec = columns.beside, _PARTS[place], self.codecs[place]
        like, bounds = (exact.keys, exact.values)[place], columns.layout.bounds
        parts = [columns.tensors[name] for name in (f"{part}_codes", f"{part}_levels", "positions")]
        # In bfloat16 it takes less time too, but of 28 documents that were read so it lost 21 answers and won 13.
        readable = type(codec) is Codec and codec.bits and codec.turned and like.dtype == torch.float32
        contiguous = all([part.is_contiguous() for part in (*parts, *(bounds or ()))])
        if not (readable and contiguous and like.is_cpu and fused.available(like.device)):
            return None
        codes, levels, positions = parts
        return Decoder(codec, codes, levels, positions, exact.row_statistics()[place], bounds, like)

    def _decode(self, place: int, columns: States, exact: Exact | None) -> Tensor:
        if exact is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        part, like, statistics = _PARTS[place], (exact.keys, exact.values)[place], exact.row_statistics()[place]
        codes = Codes(columns[f"{part}_codes"], columns[f"{part}_levels"])
        codec, positions = self.codecs[place], columns["positions"]
        states: Tensor = codec.decode(codes, like.shape[-1], like.dtype, statistics, positions)
        return states

    def reader(self, columns: Columns, like: Tensor, held: int | None, visible: Visible) -> Reader | None:
        """See `Coder.reader`; None for latents and for codes of another package, which attention on codes does not
        support, and where it would be slower."""
        readable = {*map(type, self.codecs)} == {Codec} and not self.codecs[1].centred
        few = prod(columns.tensors["key_codes"].shape[:-1]) < FEW
        if not readable or (few and not fuses() and not fused.available(like.device)):
            return None
        here = InCodes(self.codecs, copy(columns), columns.beside, held, visible())  # a copy that holds no reader
        return partial(fused.attend, here) if torch.compiler.is_compiling() else fused.CodesReader(here)
