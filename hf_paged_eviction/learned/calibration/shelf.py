"""Calibrations that are found by the model's name: those of this machine, and those that come with the package."""

import hashlib
import os
import re
import warnings
from pathlib import Path
from typing import Any

from .calibration import different_model
from .files import load_calibration

#: Where another folder is wanted than the user's cache.
HOME = "HF_PAGED_EVICTION_HOME"
#: What the name of a GGUF file has behind that of its model.
_QUANTISED = re.compile(r"(\.[\w]+)?\.gguf$")
_PUBLISHED = Path(__file__).parent / "published"


def shelf() -> Path:
    """The folder of this machine's calibrations: `$HF_PAGED_EVICTION_HOME`, else in the user's cache."""
    home = os.environ.get(HOME)
    if home:
        return Path(home).expanduser() / "calibrations"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "hf_paged_eviction" / "calibrations"


def shelf_name(config: Any) -> str | None:
    """What a model's calibration is called there; None of a model that was not loaded by a name.

    A repository keeps its name. A folder gets the digest of its path besides, since many are called alike.
    """
    name = str(getattr(config, "_name_or_path", "") or "").strip()
    if not name:
        return None
    plain = re.sub(r"[^\w.-]+", "--", name.strip("/\\"))
    if not Path(name).expanduser().exists():
        return f"{plain}.safetensors"
    path = Path(name).expanduser().resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.safetensors"


def find_calibration(config: Any) -> Path | None:
    """The calibration of a model, by its name; None if there is none that fits.

    First those of this machine, then those that come with the package, where the last part of the name counts. A file
    that was made for a model of another shape, or cannot be read, is warned of and passed over.

    Args:
        config: `model.config`.
    """
    name = shelf_name(config)
    if name is None:
        return None
    last = _QUANTISED.sub("", Path(str(config._name_or_path).replace("\\", "/")).name.lower())
    for path in (shelf() / name, _PUBLISHED / f"{last}.safetensors"):
        try:
            if not path.is_file():
                continue
            reason = different_model(load_calibration(path).model, config)
        except (OSError, ValueError) as error:
            reason = str(error)
        if not reason:
            return path
        warnings.warn(f"The calibration {path} is passed over: {reason}.", stacklevel=2)
    return None
