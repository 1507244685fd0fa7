"""The precision that keeps coefficients instead of numbers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_paged_eviction.internals import Codecs, LocalHeads, Precision, check_bits, is_latent_attention

from .basis import Basis, load_basis
from .codec import RankCodec, check_rank


@dataclass(frozen=True)
class LowRank(Precision):
    """Keep of keys and values the coefficients of the first directions of a basis that was fitted to the model.

    What `bits=` leaves as it came stays as it came. Such a cache cannot be saved:
    `PagedEvictionCache(..., bits=LowRank("FILE", rank=(48, 64), bits=4))`.

    Args:
        file: what `paged-eviction fit-basis` wrote for this model, or a `Basis`.
        rank: directions; a pair `(keys, values)` gives each its own, None = as many as there are channels.
        bits: of a coefficient, as `bits=` of a cache.

    Raises:
        TypeError, ValueError: they are no ranks or bits, or there is no such file. By `check_model`: the basis belongs
            to another model.
    """

    file: str | Path | Basis
    rank: int | tuple[int | None, int | None] | None = None
    bits: int | tuple[int | None, int | None] | None = None

    def __post_init__(self) -> None:
        if check_rank(self.rank) == (None, None):
            raise ValueError(f"{self.label} says no rank: write LowRank(file, rank=64), or rank=(48, 64).")
        _ = self.rounding, self.basis  # read at once, so that a file that is not there is an error here

    @cached_property
    def basis(self) -> Basis:
        """What the file says."""
        return self.file if isinstance(self.file, Basis) else load_basis(self.file)

    @property
    def rounding(self) -> tuple[int | None, int | None]:
        return check_bits(self.bits)

    @property
    def label(self) -> str:
        file = "BASIS" if isinstance(self.file, Basis) else str(self.file)
        settings = {"file": file, "rank": self.rank, "bits": self.bits}
        inside = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        return f"low_rank({inside})"

    def check_model(self, config: Any) -> None:
        if is_latent_attention(config):
            raise ValueError("low_rank: this model caches latents (MLA), which are of low rank already. Use bits=4.")
        self.basis.check_model(config)

    def codecs(self, index: int, plain: Codecs, local_heads: LocalHeads) -> Codecs:
        ranks = check_rank(self.rank)
        layer = self.basis.layer(index, ranks)
        pairs = zip((layer.keys, layer.values), ranks, plain, strict=True)
        keys, values = (
            codec if rank is None else RankCodec(axes, rank, codec.bits, local_heads) for axes, rank, codec in pairs
        )
        return keys, values

    @property
    def saved(self) -> Any:
        raise ValueError(
            "low_rank keeps tokens as coefficients, which mean nothing without the very basis that made them, and that "
            "is not in the file. Save a cache of plain bits=, where it has to be small."
        )
