"""Calibrations as files."""

import json
from pathlib import Path
from typing import Any

from ...naming.files import NamedFiles
from ...naming.fitted import FittedFiles, Tensors
from ...naming.tensors import FileKind
from ..measured import Measured
from ..shares import HeadShares
from .calibration import Calibration
from .score import VERSION, LayerScore

#: Value of "keys" in files whose scores read keys before rotary embedding; others read keys as cached.
_UNROTATED = "unrotated"
#: Name of the file in a repository on the Hub.
FILE_NAME = "calibration.safetensors"


#: Shares of the tokens for which there are shares of heads.
_KEPT = "kept"
_SHARES = "shares"
#: The caches that were tried.
_MEASURED = "measured"


def _made(layers: Tensors, metadata: dict[str, Any]) -> Calibration:
    scores = {index: LayerScore.of(parts) for index, parts in layers.items()}
    shares = None
    if _KEPT in metadata:
        kept_shares = tuple(float(share) for share in json.loads(metadata[_KEPT]))
        shares = HeadShares(kept_shares, {index: parts[_SHARES] for index, parts in layers.items()})
        wrong = [index for index, table in shares.layers.items() if table.shape[1] != scores[index].kv_heads]
        if wrong:
            raise ValueError(f"the shares of layer {wrong[0]} are those of another number of KV heads")
    if metadata.get("keys", _UNROTATED) != _UNROTATED:
        raise ValueError(f"its scores read keys that are {metadata['keys']!r}, and not {_UNROTATED!r}")
    measured = Measured.of(metadata[_MEASURED]) if _MEASURED in metadata else None
    if measured is not None and shares is None and any(row.allocator != "uniform" for row in measured.rows):
        raise ValueError("it was measured with shares of heads, and has none")
    return Calibration(
        scores, metadata["model"], metadata["facts"], metadata.get("keys") == _UNROTATED, shares, measured
    )


_FILES = FittedFiles(
    FileKind("calibration", VERSION, "feature_version"),
    NamedFiles("No calibration", "paged-eviction prepare", FILE_NAME),
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
    """Write a calibration; `load_calibration` reads it back bit by bit.

    Raises:
        ValueError, TypeError: its measurements could not be read back.
    """
    layers = {index: layer.tensors() for index, layer in calibration.layers.items()}
    more = {"keys": _UNROTATED} if calibration.unrotated else {}
    if calibration.shares is not None:
        more[_KEPT] = json.dumps(calibration.shares.kept)
        layers = {index: {**parts, _SHARES: calibration.shares.layers[index]} for index, parts in layers.items()}
    if calibration.measured is not None:
        more[_MEASURED] = calibration.measured.text
        Measured.of(more[_MEASURED])
    _FILES.save(path, layers, calibration.model, calibration.facts, **more)
