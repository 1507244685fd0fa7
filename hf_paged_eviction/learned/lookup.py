"""Find profiles by the digest of a model's weights, on this machine and in the package."""

import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..integration.weights import registered_digest
from ..naming.by_object import ByObject
from .calibration import WEIGHTS, different_model, fingerprint, load_calibration
from .measured import Use

#: Environment variable for another folder than the user's cache.
HOME = "HF_PAGED_EVICTION_HOME"
_PUBLISHED = Path(__file__).parent / "published"
_SUFFIX = ".safetensors"
#: Chosen profiles with their use and digest of weights, by configuration.
_CHOSEN = ByObject[tuple[Path, Use, str | None]]()


def profile_dir() -> Path:
    """The folder of this machine's calibrations: `$HF_PAGED_EVICTION_HOME`, else in the user's cache."""
    home = os.environ.get(HOME)
    if home:
        return Path(home).expanduser() / "calibrations"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "hf_paged_eviction" / "calibrations"


def profile_path(digest: str, use: Use = "both") -> Path:
    """The path of the profile of these weights for a use on this machine; the file may not exist."""
    return profile_dir() / (f"{digest}{_SUFFIX}" if use == "both" else f"{digest}.{use}{_SUFFIX}")


def profile_paths(digest: str, use: Use) -> list[Path]:
    """The paths of all profiles of these weights on this machine: of a use, for both, and of the others."""
    uses: tuple[Use, ...] = (use, "both", "questions", "text")
    return [path for path in dict.fromkeys(profile_path(digest, one) for one in uses) if os.path.lexists(path)]


def why_unusable(path: Path, config: Any) -> str:
    """Why a file is no profile of a model whose weights are registered; "" = it is one."""
    try:
        calibration = load_calibration(path)
        calibration.check_model(config)
        return different_model({WEIGHTS: "not named", **calibration.model}, fingerprint(config))
    except ValueError as error:
        return str(error)


def profiles_of_shape(config: Any) -> list[Path]:
    """The profiles on this machine and in the package that models of this shape have, whatever their weights."""
    shape = fingerprint(config)
    shape.pop(WEIGHTS, None)
    return [path for path in (*sorted(profile_dir().glob(f"*{_SUFFIX}")), *_published().values()) if _fits(path, shape)]


def _fits(path: Path, shape: Mapping[str, str]) -> bool:
    try:
        return not different_model(load_calibration(path).model, shape)
    except ValueError:  # a damaged file is no profile of any model
        return False


def use_profile(config: Any, profile: Path, use: Use) -> None:
    """Let caches that are made from this configuration use this profile for this use."""
    chosen = profile, use, registered_digest(config)
    for key in (config, config.get_text_config(decoder=True)):
        _CHOSEN[key] = chosen


def chosen_use(config: Any) -> Use:
    """The use that was chosen for a model, see `prepare`."""
    chosen = _CHOSEN.get(config)
    return "both" if chosen is None else chosen[1]


def chosen_profile(config: Any) -> Path | None:
    """The profile that `prepare` chose for a model, if its weights are still the same."""
    chosen = _CHOSEN.get(config)
    return chosen[0] if chosen is not None and chosen[2] == registered_digest(config) else None


def find_calibration(config: Any) -> Path | None:
    """Find the calibration of a model by the digest of its weights; None if none fits.

    The order: the one that `prepare` chose, those on this machine (for the use that was chosen first), those in the
    package. A file that cannot be read, or that belongs to other weights, is skipped with a warning.

    Args:
        config: `model.config` of a model whose weights are registered (`register_weights`); for others the result is
            None.
    """
    digest = registered_digest(config)
    if digest is None:
        return None
    chosen = chosen_profile(config)
    if chosen is not None:
        return chosen
    for path in profile_paths(digest, chosen_use(config)):
        reason = why_unusable(path, config)
        if not reason:
            return path
        warnings.warn(f"The profile {path} is skipped: {reason.removesuffix('.')}.", stacklevel=2)
    return published_profile(digest)


def published_profile(digest: str) -> Path | None:
    """The profile of these weights in the package."""
    return _published().get(digest)


def why_none(config: Any) -> str:
    """Why `find_calibration` finds nothing for a model, with the way out."""
    if registered_digest(config) is None:
        return (
            "it is not known which weights these are. Call prepare(model, tokenizer) or register_weights(model) before "
            "the cache is made, or name a file: profile=FILE"
        )
    return (
        "this machine has none of these weights. prepare(model, tokenizer) measures one, or name a file: profile=FILE"
    )


@cache
def _published() -> dict[str, Path]:
    """The package's own, by the digest of the weights that each was fitted to."""
    paths = sorted(_PUBLISHED.glob(f"*{_SUFFIX}"))
    return {load_calibration(path).model[WEIGHTS]: path for path in paths}
