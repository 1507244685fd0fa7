"""Calibrations that are found by the digest of a model's weights: those of this machine, and those of the package."""

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from ...integration.weights import registered_digest
from .calibration import WEIGHTS, different_model, fingerprint
from .files import load_calibration

#: Where another folder is wanted than the user's cache.
HOME = "HF_PAGED_EVICTION_HOME"
_PUBLISHED = Path(__file__).parent / "published"
_SUFFIX = ".safetensors"


def shelf() -> Path:
    """The folder of this machine's calibrations: `$HF_PAGED_EVICTION_HOME`, else in the user's cache."""
    home = os.environ.get(HOME)
    if home:
        return Path(home).expanduser() / "calibrations"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "hf_paged_eviction" / "calibrations"


def shelf_file(digest: str) -> Path:
    """Where the calibration of a model with these weights lies on this machine, whether there is one or not."""
    return shelf() / f"{digest}{_SUFFIX}"


def find_calibration(config: Any) -> Path | None:
    """The calibration of a model, by the digest of its weights; None if there is none that fits.

    First that of this machine, then those that come with the package. A file that cannot be read, or belongs to other
    weights, is warned of and passed over.

    Args:
        config: `model.config` of a model whose weights are registered (`register_weights`): others have no calibration
            that could be told to be theirs.
    """
    digest = registered_digest(config)
    if digest is None:
        return None
    path = shelf_file(digest)
    if path.is_file():
        try:
            found = load_calibration(path).model
            reason = different_model({WEIGHTS: "not named", **found}, fingerprint(config))
        except ValueError as error:
            reason = str(error)
        if not reason:
            return path
        warnings.warn(f"The calibration {path} is passed over: {reason.removesuffix('.')}.", stacklevel=2)
    return _published().get(digest)


def has_calibrations(config: Any) -> bool:
    """Whether there are calibrations for models of this shape, which may be this one's or not."""
    shape = fingerprint(config)
    own = shelf().glob(f"*{_SUFFIX}") if shelf().is_dir() else ()
    for path in (*own, *_published().values()):
        try:
            if not different_model(load_calibration(path).model, shape):
                return True
        except ValueError:
            continue
    return False


@cache
def _published() -> dict[str, Path]:
    """The package's own, by the digest of the weights that each was fitted to."""
    paths = sorted(_PUBLISHED.glob(f"*{_SUFFIX}"))
    return {load_calibration(path).model[WEIGHTS]: path for path in paths}
