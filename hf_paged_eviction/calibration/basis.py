"""Bases as files: safetensors, with the model that they belong to in the metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..masks.models import is_latent_attention
from ..precision.low_rank import Axes, LayerBasis, check_rank
from .calibration import fingerprint

_FORMAT = "hf_paged_eviction.basis"


@dataclass(frozen=True)
class Basis:
    """The directions of all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `fingerprint`.
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
        actual = fingerprint(config)
        different = [
            f"{name} {actual[name]} instead of {value}"
            for name, value in self.model.items()
            if name in actual and actual[name] != value
        ]
        if different:
            raise ValueError(
                f"basis= was fitted to another model: {', '.join(different)}. Fit one to this model with "
                "`paged-eviction fit-basis`."
            )

    def layer(self, index: int, ranks: tuple[int | None, int | None]) -> LayerBasis:
        """Of one layer.

        Raises:
            ValueError: it has none, or there are fewer directions than a rank.
        """
        if index not in self.layers:
            raise ValueError(f"basis= knows nothing of layer {index}: fit one with `paged-eviction fit-basis`.")
        found = self.layers[index]
        for rank, axes in zip(ranks, (found.keys, found.values), strict=True):
            if rank is not None and rank > axes.dim:
                raise ValueError(f"rank={rank} is more than the {axes.dim} channels of a head in layer {index}.")
        return found


def save_basis(basis: Basis, path: str | Path) -> None:
    """Write a basis; `load_basis` reads it back bit by bit."""
    tensors = {
        f"layers.{index}.{kind}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in basis.layers.items()
        for kind, axes in vars(layer).items()
        for name, tensor in vars(axes).items()
    }
    metadata = {"format": _FORMAT, "model": json.dumps(dict(basis.model)), "facts": json.dumps(dict(basis.facts))}
    save_file(tensors, path, metadata)
    Path(path).chmod(0o644)  # it is written as a private file


def load_basis(path: str | Path) -> Basis:
    """Read a basis that `paged-eviction fit-basis` wrote.

    Raises:
        ValueError: it does not exist, or is no basis.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"basis={str(path)!r}: there is no such file. `paged-eviction fit-basis` writes one.")
    status = file.stat()
    return _load(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Basis:
    """Cached for as long as the file is the same."""
    tensors: dict[int, dict[str, dict[str, Any]]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is another kind of safetensors file")
            for name in file.keys():  # noqa: SIM118 - no dictionary
                _, index, kind, part = name.split(".")
                tensors.setdefault(int(index), {}).setdefault(kind, {})[part] = file.get_tensor(name)
        if not tensors:
            raise ValueError("it holds no layer")
        layers = {}
        for index, kinds in sorted(tensors.items()):
            keys, values = (Axes(**kinds[kind]) for kind in ("keys", "values"))
            keys.check()
            values.check()
            layers[index] = LayerBasis(keys, values)
        return Basis(layers, json.loads(metadata["model"]), json.loads(metadata["facts"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Cannot use the basis {str(path)!r}: {error}.") from error


def chosen_basis(
    rank: object, basis: str | Path | Basis | None, config: Any
) -> tuple[tuple[int | None, int | None], Basis | None]:
    """Ranks of keys and values, and the basis where there are any, from what a user gave.

    Raises:
        TypeError, ValueError: they are no ranks, one of the two is missing, or the basis does not fit the model.
    """
    ranks = check_rank(rank)
    if ranks == (None, None):
        if basis is not None:
            raise ValueError("basis= says how to keep tokens, and rank= how much of them: give rank= too.")
        return ranks, None
    if basis is None:
        raise ValueError(
            f"rank={rank!r} needs basis=, a file of the model's directions: `paged-eviction fit-basis` writes one."
        )
    if is_latent_attention(config):
        raise ValueError("rank=: this model caches latents (MLA), which are of low rank already. Use bits=.")
    found = basis if isinstance(basis, Basis) else load_basis(basis)
    found.check_model(config)
    return ranks, found
