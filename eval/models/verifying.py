"""Whether the cache is right for a model: what `paged-eviction verify` does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from ..console import progress, say
from ..errors import UserError
from ..options.files import check_output
from ..options.settings import Settings
from ..progress import Progress
from ..verify import Verification, verify
from . import loading as models
from .device import is_out_of_memory

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")


def run_verify(settings: Settings, output: Path | None, **checks: Any) -> Verification:
    """Verify a model, print the table, and write it to `output`.

    Args:
        settings: which model, and where it runs.
        checks: as for `verify`.

    Raises:
        UserError: the model cannot be loaded, the budget not be used, or the file not be written.
    """
    notes = Console(stderr=True)
    if output is not None:
        check_output(output, ".json")
    say(notes, f"loading {settings.model}")
    model = load(settings, notes)
    try:
        with progress(notes, "checks") as watch:
            report = verify(model, **checks, progress=lambda done, total: watch(Progress(done, total)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"the model {settings.model!r} leaves no memory on {settings.device}: try --dtype bfloat16 or "
            "--device-map auto"
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    say(Console(), str(report))
    if not checks.get("thorough", True):
        say(notes, f"{len(report.checks)} checks that find most; every setting under each question: --thorough")
    if output is not None:
        output.write_text(json.dumps({**asdict(report), "ok": report.ok}, indent=1) + "\n", "utf-8")
    return report


def load(settings: Settings, notes: Console) -> Any:
    """The model, with random weights where its folder holds a configuration alone.

    Raises:
        UserError: there is no such model, or it does not fit.
    """
    config, folder = models.load_config(settings), Path(models.source(settings.model))
    if not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return models.load_model(settings, _kind(config))
    say(notes, f"{settings.model} holds no weights: random ones are used")
    wanted: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.attn_implementation is not None:
        wanted["attn_implementation"] = settings.attn_implementation
    dtype = models.resolve_dtype(settings)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = _kind(config).from_config(config, **wanted)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot make the model {settings.model!r}: {error}") from error
    return model.to(device=settings.device, dtype=None if dtype == "auto" else dtype).eval()


def _kind(config: Any) -> Any:
    """The auto class that makes a model with this configuration speak."""
    kinds = [AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM]
    ordered = kinds[::-1] if config.is_encoder_decoder else kinds
    return next((kind for kind in ordered if type(config) in kind._model_mapping), AutoModelForCausalLM)
