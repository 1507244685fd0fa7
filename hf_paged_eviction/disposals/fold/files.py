"""Kernels as files: safetensors, with what they belong to in the metadata."""

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .kernels import Kernels, LayerKernels

#: Raised whenever the formula changes: kernels of one version mean nothing in another.
VERSION = 1
_FORMAT = "hf_paged_eviction.fold"
_NAMED: dict[str, Path] = {}


def name_kernels(name: str, path: Path) -> None:
    """Let `fold:name` mean this file, for files that come with a package."""
    _NAMED[name] = path


def save_kernels(kernels: Kernels, path: str | Path) -> None:
    """Write kernels; `load_kernels` reads them back bit by bit."""
    tensors = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in kernels.layers.items()
        for name, tensor in layer.tensors().items()
    }
    metadata = {
        "format": _FORMAT,
        "version": str(VERSION),
        "model": json.dumps(dict(kernels.model)),
        "policy": kernels.policy,
        "facts": json.dumps(dict(kernels.facts)),
    }
    save_file(tensors, path, metadata)
    Path(path).chmod(0o644)  # it is written as a private file


def load_kernels(name: str | Path) -> Kernels:
    """Read kernels.

    Args:
        name: a file, or a name given to one.

    Raises:
        ValueError: it does not exist, or holds no kernels of this version.
    """
    path = find_kernels(str(name))
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


def find_kernels(name: str) -> Path:
    """The file that a name stands for.

    Raises:
        ValueError: there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name in _NAMED and _NAMED[name].is_file():
        return _NAMED[name]
    named = f", or one of the names {', '.join(sorted(_NAMED))}" if _NAMED else ""
    raise ValueError(
        f"No kernels {name!r}: there is no such file. Expected a file that `paged-eviction fit-fold` wrote{named}."
    )


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Kernels:
    """Cached for as long as the file is the same."""
    tensors: dict[int, dict[str, object]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is another kind of safetensors file")
            if metadata.get("version") != str(VERSION):
                raise ValueError(
                    f"it is of version {metadata.get('version')}, this package has {VERSION}; fit kernels anew"
                )
            for name in file.keys():  # noqa: SIM118 - no dictionary
                _, index, part = name.split(".")
                tensors.setdefault(int(index), {})[part] = file.get_tensor(name)
        if not tensors:
            raise ValueError("it holds no layer")
        layers = {index: LayerKernels.of(parts) for index, parts in sorted(tensors.items())}  # type: ignore[arg-type]
        model, facts = json.loads(metadata["model"]), json.loads(metadata["facts"])
        digest = sha256(path.read_bytes()).hexdigest()
        return Kernels(layers, model, metadata["policy"], facts, digest)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"Cannot use the kernels {str(path)!r}: {error}.") from error
