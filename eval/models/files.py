"""The digest of weights that lie in files, read where they are: no weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_paged_eviction import register_weights

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def folder_of(name: str, revision: str | None = None) -> Path | None:
    """The folder with the files of a model; None if they are not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def register_files(folder: Path, config: Any, **code: Any) -> str:
    """Register the weights in a folder for a configuration, as `register_weights` does for a loaded model.

    Tensors are mapped into memory, of which the digest reads a sample.

    Args:
        config: that of the folder. Profiles are found for this very object.
        code: arguments of `from_config`.

    Returns:
        Why it was not possible; "" if it was.
    """
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised, and their digest is known only when they are loaded"
    if (folder / "adapter_config.json").exists():
        return "it is an adapter, and the digest is known only when it is loaded with its model"
    if not (folder / _SINGLE).exists() and not (folder / _INDEX).exists():
        return f"it has neither {_SINGLE} nor {_INDEX}"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **code)
        model.load_state_dict(_tensors(folder), strict=False, assign=True)
        model.tie_weights()
        model.config = config
        register_weights(model)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        return f"its files cannot be read ({error})"
    except Exception as error:  # each family has its own reasons, such as names that are changed while it is loaded
        return f"its files do not hold the tensors of the model as they are ({str(error).splitlines()[0]})"
    return ""


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / _SINGLE).exists():
        names = {_SINGLE}
    else:
        names = set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values())
    return {key: tensor for name in sorted(names) for key, tensor in load_file(folder / name).items()}
