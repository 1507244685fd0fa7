"""Bases: directions of keys and values that were fitted to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from hf_paged_eviction.internals import FileKind, FittedFiles, Tensors

from ..fitted import Fitted, Layer


@dataclass(frozen=True)
class Axes(Layer):
    """Directions for the keys, or the values, of one layer, those that matter most first.

    Attributes:
        mean: `[kv_heads, dim]`, what is subtracted first.
        down: `[kv_heads, dim, dim]`: a token's coefficients are its product with the first columns.
        up: `[kv_heads, dim, dim]`: coefficients times these columns, and the mean, are the token again.
    """

    mean: Tensor
    down: Tensor
    up: Tensor

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.mean.shape[-1]


@dataclass(frozen=True)
class LayerBasis:
    """Of one layer."""

    keys: Axes
    values: Axes


@dataclass(frozen=True)
class Basis(Fitted[LayerBasis]):
    """The directions of all layers of a model that evict."""

    subject: ClassVar[str] = "This basis was fitted to"
    command: ClassVar[str] = "paged-eviction fit-basis"

    def layer(self, index: int, ranks: tuple[int | None, int | None]) -> LayerBasis:
        """Of one layer.

        Raises:
            ValueError: it has none, or there are fewer directions than a rank.
        """
        if index not in self.layers:
            raise ValueError(f"This basis knows nothing of layer {index}: fit one with `{self.command}`.")
        layer = self.layers[index]
        for rank, axes in zip(ranks, (layer.keys, layer.values), strict=True):
            if rank is not None and rank > axes.dim:
                raise ValueError(f"rank={rank} is more than the {axes.dim} channels of a head in layer {index}.")
        return layer


# ---- files ----------------------------------------------------------------------------------------------------------


def _made(layers: Tensors, header: dict[str, Any]) -> Basis:
    return Basis({index: _layer(parts) for index, parts in layers.items()}, header["model"], header["facts"])


def _layer(parts: Mapping[str, Tensor]) -> LayerBasis:
    kinds: dict[str, dict[str, Tensor]] = {"keys": {}, "values": {}}
    for name, tensor in parts.items():
        kind, part = name.split(".")
        kinds[kind][part] = tensor
    layer = LayerBasis(Axes(**kinds["keys"]), Axes(**kinds["values"]))
    for axes in (layer.keys, layer.values):
        heads, dim = len(axes.down), axes.dim
        axes.check_shapes({"mean": (heads, dim), "down": (heads, dim, dim), "up": (heads, dim, dim)})
    return layer


_FILES = FittedFiles(FileKind("basis", None), Basis.command, _made)
load_basis = _FILES.load


def save_basis(basis: Basis, path: str | Path) -> None:
    """Write a basis; `load_basis` reads it back bit by bit."""
    layers = {
        index: {f"{kind}.{name}": tensor for kind, axes in vars(layer).items() for name, tensor in vars(axes).items()}
        for index, layer in basis.layers.items()
    }
    _FILES.save(path, layers, basis.model, basis.facts)
