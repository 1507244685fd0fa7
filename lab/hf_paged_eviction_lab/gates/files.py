"""Gates as files."""

from pathlib import Path
from typing import Any

from hf_paged_eviction.internals import FileKind, FittedFiles, NamedFiles, Tensors

from .gates import GateLayer, Gates

#: What the file is called in a repository on the Hub.
FILE_NAME = "gates.safetensors"


def _made(layers: Tensors, header: dict[str, Any]) -> Gates:
    return Gates({index: GateLayer.of(parts) for index, parts in layers.items()}, header["model"], header["facts"])


_FILES = FittedFiles(FileKind("gates"), NamedFiles("No gates", "paged-eviction fit-gate", FILE_NAME), _made)
load_gates = _FILES.load
#: Let `gate:name` mean a file that comes with a package.
name_gates = _FILES.names.name
for _file in sorted((Path(__file__).parent / "published").glob("*.safetensors")):
    name_gates(_file.stem, _file)
#: Whether a name stands for a file on this machine.
is_here = _FILES.names.is_here


def save_gates(gates: Gates, path: str | Path) -> None:
    """Write gates; `load_gates` reads them back bit by bit."""
    _FILES.save(path, {index: layer.tensors() for index, layer in gates.layers.items()}, gates.model, gates.facts)
