"""Kernels as files."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from hf_paged_eviction.internals import FileKind, FittedFiles, NamedFiles, Tensors

from .kernels import Kernels, LayerKernels


def _made(layers: Tensors, header: dict[str, Any]) -> Kernels:
    kernels = {index: LayerKernels.of(parts) for index, parts in layers.items()}
    return Kernels(
        kernels, header["model"], header["policy"], header["facts"], sha256(header["path"].read_bytes()).hexdigest()
    )


_FILES = FittedFiles(FileKind("fold"), NamedFiles("No kernels", "paged-eviction fit-fold"), _made, "kernels")
load_kernels = _FILES.load
#: Let `fold:name` mean this file, for files that come with a package.
name_kernels = _FILES.names.name
name_kernels("embedded", Path(__file__).parent / "published" / "embedded.safetensors")


def save_kernels(kernels: Kernels, path: str | Path) -> None:
    """Write kernels; `load_kernels` reads them back bit by bit."""
    layers = {index: layer.tensors() for index, layer in kernels.layers.items()}
    _FILES.save(path, layers, kernels.model, kernels.facts, policy=kernels.policy)
