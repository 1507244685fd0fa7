"""Calibrations as files: safetensors, with what they belong to in the metadata."""

import json
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .calibration import Calibration, LayerScore
from .features import VERSION

#: What the file is called in a repository on the Hub.
FILE_NAME = "calibration.safetensors"
_FORMAT = "hf_paged_eviction.calibration"
_NAMED: dict[str, Path] = {}


def name_calibration(name: str, path: Path) -> None:
    """Let `calibrated:name` mean this file, for files that come with a package."""
    _NAMED[name] = path


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


def is_here(name: str) -> bool:
    """Whether a name stands for a file on this machine."""
    return _find_here(name)[1] is not None


def _find_here(name: str) -> tuple[Path, Path | None]:
    """The name as a path, and the file that it stands for."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # a home that nobody has
        path = Path(name)
    if path.is_file():
        return path, path
    return path, _NAMED[name] if name in _NAMED and _NAMED[name].is_file() else None


def find_file(name: str) -> Path:
    """The local file that a name stands for, downloaded if need be.

    Raises:
        ValueError: there is none.
    """
    path, found = _find_here(name)
    if found is not None:
        return found
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or path.suffix or name.startswith((".", "~")):
        raise ValueError(_missing(name, "there is no such file"))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE_NAME))
    except Exception as error:  # the client has a class of its own for each way to fail
        raise ValueError(_missing(name, f"there is no such file, and the Hub says: {error}")) from error


def _missing(name: str, reason: str) -> str:
    named = f", one of the names {', '.join(sorted(_NAMED))}" if _NAMED else ""
    return (
        f"No calibration {name!r}: {reason}. Expected a file that `paged-eviction calibrate` wrote{named}, or a "
        f"repository on the Hugging Face Hub (organisation/name) with a file {FILE_NAME}."
    )


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
