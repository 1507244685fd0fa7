"""What `paged-eviction plan` does."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from hf_paged_eviction import Plan
from hf_paged_eviction import plan as plan_model

from ..errors import UserError
from ..options.model import EMBEDDED, ModelOptions
from . import loading as models
from .device import model_settings


def run_plan(options: Any) -> Plan:
    """Read the configuration of a model, and print what fits.

    Args:
        options: of the command.

    Raises:
        UserError: there is no such model, it cannot be planned, or a number cannot be used.
    """
    settings = model_settings(ModelOptions(**{**options.common(ModelOptions), "device": "cpu"}))
    config = models.load_config(settings)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.dtype == "auto" and options.model == EMBEDDED:
        dtype = torch.float32  # its file is half precision to be small, not to be computed in
    try:
        planned = plan_model(
            config,
            options.context,
            options.memory,
            rows=options.rows,
            chunk=options.chunk,
            dtype=dtype,
            profile=options.profile,
        )
    except ValueError as error:
        raise UserError(f"cannot plan {options.model!r}: {error}") from error
    Console(soft_wrap=True, highlight=False).print(str(planned), markup=False)
    return planned
