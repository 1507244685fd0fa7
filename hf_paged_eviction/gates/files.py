"""Gates as files: safetensors, with what they belong to in the metadata."""

import json
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..naming.files import NamedFiles
from .gates import GateLayer, Gates

#: What the file is called in a repository on the Hub.
FILE_NAME = "gates.safetensors"
_FORMAT = "hf_paged_eviction.gates"
#: Raised whenever the numbers come to mean something else.
_VERSION = "1"
_FILES = NamedFiles("No gates", "paged-eviction fit-gate", FILE_NAME)
#: Let `gate:name` mean a file that comes with a package.
name_gates = _FILES.name
#: Whether a name stands for a file on this machine.
is_here = _FILES.is_here


def save_gates(gates: Gates, path: str | Path) -> None:
    """Write gates; `load_gates` reads them back bit by bit."""
    tensors = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in gates.layers.items()
        for name, tensor in layer.tensors().items()
    }
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": json.dumps(dict(gates.model)),
        "facts": json.dumps(dict(gates.facts)),
    }
    save_file(tensors, path, metadata)
    Path(path).chmod(0o644)  # it is written as a private file


def load_gates(name: str | Path) -> Gates:
    """Read gates.

    Args:
        name: a file; a name given to one; or a repository on the Hugging Face Hub, `organisation/name`, with a file
            `gates.safetensors`.

    Raises:
        ValueError: it does not exist, or holds no gates of this version.
    """
    path = _FILES.find(str(name))
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Gates:
    """Cached for as long as the file is the same."""
    tensors: dict[int, dict[str, object]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is another kind of safetensors file")
            if metadata.get("version") != _VERSION:
                raise ValueError(f"it is of version {metadata.get('version')}, this package reads {_VERSION}")
            for name in file.keys():  # noqa: SIM118 - no dictionary
                _, index, part = name.split(".")
                tensors.setdefault(int(index), {})[part] = file.get_tensor(name)
        if not tensors:
            raise ValueError("it holds no layer")
        layers = {index: GateLayer.of(parts) for index, parts in sorted(tensors.items())}  # type: ignore[arg-type]
        return Gates(layers, json.loads(metadata["model"]), json.loads(metadata["facts"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Cannot use the gates {str(path)!r}: {error}.") from error
