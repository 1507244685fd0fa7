"""SmolLM2-135M-Instruct in the form of transformers, if `SMOLLM2_FOLDER` names a folder with it."""

import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("SMOLLM2_FOLDER", "no folder"))
PROFILE = (
    Path(__file__).parents[2] / "hf_paged_eviction" / "learned" / "published" / "smollm2-135m-instruct.safetensors"
)
REAL = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER.exists(), reason="SMOLLM2_FOLDER names no folder with SmolLM2-135M-Instruct"),
]
#: What `prepare` chose, for a quarter of a thousand tokens.
OPTIONS: dict[str, Any] = {"budget": 256, "policy": "calibrated", "allocator": "heads", "profile": str(PROFILE)}


def model() -> Any:
    """The model in transformers, with queries shown."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="paged_eviction").float().eval()
