"""Calibrations as files."""

from pathlib import Path
from typing import Any

from ...naming.files import NamedFiles
from ...naming.fitted import FittedFiles, Tensors
from ...naming.tensors import FileKind
from .calibration import Calibration, LayerScore
from .features import VERSION

#: What files say of the keys that they score; where they say nothing, it is keys as cached.
_UNROTATED = "unrotated"
#: What the file is called in a repository on the Hub.
FILE_NAME = "calibration.safetensors"


def _made(layers: Tensors, said: dict[str, Any]) -> Calibration:
    scores = {index: LayerScore.of(parts) for index, parts in layers.items()}
    return Calibration(scores, said["model"], said["facts"], said.get("keys") == _UNROTATED)


_FILES = FittedFiles(
    FileKind("calibration", VERSION, "feature_version"),
    NamedFiles("No calibration", "paged-eviction calibrate", FILE_NAME),
    _made,
)
load_calibration = _FILES.load
#: Let `calibrated:name` mean a file that comes with a package.
name_calibration = _FILES.names.name
#: Whether a name stands for a file on this machine.
is_here = _FILES.names.is_here
#: The local file that a name stands for, downloaded if need be.
find_file = _FILES.names.find


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration; `load_calibration` reads it back bit by bit."""
    layers = {index: layer.tensors() for index, layer in calibration.layers.items()}
    keys = {"keys": _UNROTATED} if calibration.unrotated else {}
    _FILES.save(path, layers, calibration.model, calibration.facts, **keys)
