"""The weights that lie in files of this machine: which they are, without loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError

from hf_paged_eviction.internals import register_checkpoint


def folder_of(name: str, revision: str | None = None) -> Path | None:
    """The folder with the files of a model; None if they are not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def register_files(folder: Path, config: Any) -> str:
    """Register the weights in a folder for a configuration, as `register_weights` does for a loaded model.

    Returns:
        Why it was not possible; "" if it was.
    """
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised, and their digest is known only when they are loaded"
    if (folder / "adapter_config.json").exists():
        return "it is an adapter, and the digest is known only when it is loaded with its model"
    try:
        digest = register_checkpoint(config, folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"its files cannot be read ({error})"
    return "it has no model.safetensors, nor parts of it" if digest is None else ""
