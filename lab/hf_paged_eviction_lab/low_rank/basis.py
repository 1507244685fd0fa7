"""Bases as files: safetensors, with the model that they belong to in the metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_paged_eviction.internals import FileKind, FittedFiles, NamedFiles, Tensors, fingerprint, refuse_other_model

from .codec import Axes, LayerBasis


@dataclass(frozen=True)
class Basis:
    """The directions of all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `model_fingerprint`.
        facts: what it was fitted to.
    """

    layers: Mapping[int, LayerBasis]
    model: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)

    def check_model(self, config: Any) -> None:
        """Refuse another model.

        Raises:
            ValueError: with what differs.
        """
        remedy = "Fit one to this model with `paged-eviction fit-basis`."
        refuse_other_model(self.model, fingerprint(config), "This basis was fitted to", remedy)

    def layer(self, index: int, ranks: tuple[int | None, int | None]) -> LayerBasis:
        """Of one layer.

        Raises:
            ValueError: it has none, or there are fewer directions than a rank.
        """
        if index not in self.layers:
            raise ValueError(f"This basis knows nothing of layer {index}: fit one with `paged-eviction fit-basis`.")
        layer = self.layers[index]
        for rank, axes in zip(ranks, (layer.keys, layer.values), strict=True):
            if rank is not None and rank > axes.dim:
                raise ValueError(f"rank={rank} is more than the {axes.dim} channels of a head in layer {index}.")
        return layer


def _made(layers: Tensors, header: dict[str, Any]) -> Basis:
    return Basis({index: _layer(parts) for index, parts in layers.items()}, header["model"], header["facts"])


def _layer(parts: Mapping[str, Tensor]) -> LayerBasis:
    kinds: dict[str, dict[str, Tensor]] = {"keys": {}, "values": {}}
    for name, tensor in parts.items():
        kind, part = name.split(".")
        kinds[kind][part] = tensor
    keys, values = (Axes(**kinds[kind]) for kind in ("keys", "values"))
    keys.check()
    values.check()
    return LayerBasis(keys, values)


_FILES = FittedFiles(FileKind("basis", None), NamedFiles("No basis", "paged-eviction fit-basis"), _made)
load_basis = _FILES.load


def save_basis(basis: Basis, path: str | Path) -> None:
    """Write a basis; `load_basis` reads it back bit by bit."""
    layers = {
        index: {f"{kind}.{name}": tensor for kind, axes in vars(layer).items() for name, tensor in vars(axes).items()}
        for index, layer in basis.layers.items()
    }
    _FILES.save(path, layers, basis.model, basis.facts)
