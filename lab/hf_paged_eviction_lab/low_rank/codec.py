"""Keys or values as a few coefficients: what a model's heads say lies mostly in a few directions.

A basis is fitted to a model once (`paged-eviction fit-basis`), per layer and KV head. Of each token the coefficients of
the first directions are kept, and `bits=` may round those.
"""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import Codec, Codes, LocalHeads, RowStatistics

from .basis import Axes


class RankCodec(Codec):
    """Keeps of states `[batch, kv_heads, n, dim]` the coefficients of a few directions.

    Args:
        axes: of all KV heads of the layer.
        rank: how many directions.
        bits: of a coefficient; None = the states' own type.
        local_heads: which of the heads are here.
    """

    def __init__(self, axes: Axes, rank: int, bits: int | None, local_heads: LocalHeads) -> None:
        # Coefficients differ in size, the first are the largest: mixed, they share levels fairly.
        super().__init__(bits, turned=True)
        self._axes, self.rank, self._local_heads = axes, rank, local_heads
        self._placed: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rank}, bits={self.bits})"

    def __deepcopy__(self, memo: Any) -> "RankCodec":
        return self  # is never changed

    def shapes(self, like: Tensor, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Codec.shapes`."""
        return super().shapes(like[..., : self.rank], slots)

    def encode(
        self, states: Tensor, row_statistics: RowStatistics | None = None, positions: Tensor | None = None
    ) -> Codes:
        """See `Codec.encode`; nothing is subtracted or divided, the basis has a mean of its own."""
        wide = torch.promote_types(states.dtype, torch.float32)
        mean, down, _ = self._matrices(states, wide)
        return super().encode(((states.to(wide) - mean) @ down).to(states.dtype))

    def decode(
        self,
        codes: Codes,
        dim: int,
        dtype: torch.dtype,
        row_statistics: RowStatistics | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """See `Codec.decode`."""
        coefficients = super().decode(codes, self.rank, dtype)
        mean, _, up = self._matrices(coefficients, dtype)
        return torch.matmul(coefficients, up).add_(mean)

    def _matrices(self, states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Mean `[heads, 1, dim]`, down `[heads, dim, rank]` and up `[heads, rank, dim]`, for the heads of states."""
        heads = states.shape[1]
        key = heads, dtype, states.device
        if key not in self._placed:
            first = self._local_heads.first_head(heads)
            own = slice(first, first + heads)
            with torch.inference_mode(False):
                parts = (
                    self._axes.mean[own, None],
                    self._axes.down[own, :, : self.rank],
                    self._axes.up[own, :, : self.rank],
                )
                mean, down, up = (part.to(states.device, dtype) for part in parts)
                self._placed[key] = mean, down, up.mT.contiguous()
        return self._placed[key]


def check_rank(rank: object) -> tuple[int | None, int | None]:
    """Ranks of keys and of values from what a user gave.

    Raises:
        TypeError, ValueError: it is no rank and no pair of them.
    """
    pair = tuple(rank) if isinstance(rank, tuple | list) else (rank, rank)
    if len(pair) != 2:
        raise ValueError(f"rank= is one number for keys and values, or a pair (keys, values), got {rank!r}.")
    for number in pair:
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
            raise TypeError(f"rank= counts directions and must be a whole number, None or a pair, got {rank!r}.")
        if number is not None and number < 1:
            raise ValueError(f"rank= must be at least 1, got {rank!r}.")
    return pair[0], pair[1]
