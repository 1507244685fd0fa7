"""Calibrations as files: safetensors, with what they belong to in the metadata."""

import json
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..naming.files import NamedFiles
from .calibration import Calibration, LayerScore
from .features import VERSION

#: What the file is called in a repository on the Hub.
FILE_NAME = "calibration.safetensors"
_FORMAT = "hf_paged_eviction.calibration"
_FILES = NamedFiles("No calibration", "paged-eviction calibrate", FILE_NAME)
#: Let `calibrated:name` mean a file that comes with a package.
name_calibration = _FILES.name
#: Whether a name stands for a file on this machine.
is_here = _FILES.is_here
#: The local file that a name stands for, downloaded if need be.
find_file = _FILES.find


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration; `load_calibration` reads it back bit by bit."""
    tensors = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in calibration.layers.items()
        for name, tensor in layer.tensors().items()
    }
    metadata = {
        "format": _FORMAT,
        "feature_version": str(VERSION),
        "model": json.dumps(dict(calibration.model)),
        "facts": json.dumps(dict(calibration.facts)),
    }
    save_file(tensors, path, metadata)
    Path(path).chmod(0o644)  # it is written as a private file


def load_calibration(name: str | Path) -> Calibration:
    """Read a calibration.

    Args:
        name: a file; a name given to one; or a repository on the Hugging Face Hub, `organisation/name`, with a file
            `calibration.safetensors`.

    Raises:
        ValueError: it does not exist, or is no calibration of this version.
    """
    path = find_file(str(name))
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Calibration:
    """Cached for as long as the file is the same."""
    tensors: dict[int, dict[str, object]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is another kind of safetensors file")
            if metadata.get("feature_version") != str(VERSION):
                raise ValueError(
                    f"it has features of version {metadata.get('feature_version')}, this package has {VERSION}; make "
                    "it anew"
                )
            for name in file.keys():  # noqa: SIM118 - no dictionary
                _, index, part = name.split(".")
                tensors.setdefault(int(index), {})[part] = file.get_tensor(name)
        if not tensors:
            raise ValueError("it holds no layer")
        layers = {index: LayerScore.of(parts) for index, parts in sorted(tensors.items())}  # type: ignore[arg-type]
        return Calibration(layers, json.loads(metadata["model"]), json.loads(metadata["facts"]))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"Cannot use the calibration {str(path)!r}: {error}.") from error
