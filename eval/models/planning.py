"""What `paged-eviction plan` does."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from hf_paged_eviction import Plan
from hf_paged_eviction import plan as plan_model
from hf_paged_eviction.internals import profiles_of_shape

from ..console import say
from ..errors import UserError
from ..options.model import EMBEDDED, ModelOptions
from ..options.settings import Settings
from . import loading as models
from .device import model_settings
from .files import folder_of, register_files


def run_plan(options: Any) -> Plan:
    """Read the configuration of a model, and print what fits; with the losses of its profile, if there is one.

    Args:
        options: of the command.

    Raises:
        UserError: there is no such model, it cannot be planned, or a number cannot be used.
    """
    settings = model_settings(ModelOptions(**{**options.common(ModelOptions), "device": "cpu"}))
    config = models.load_config(settings)
    why_none = "" if options.profile else _find_profile(config, settings)
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
    if not any(choice.loss for choice in planned.choices):
        reason = why_none if planned.profile is None else f"{planned.profile} has no measurements of these precisions"
        say(Console(stderr=True), f"no losses: {reason}")
    return planned


def _find_profile(config: Any, settings: Settings) -> str:
    """Let the profile of the weights be found, where they are on this machine; otherwise say why it is not."""
    name = settings.model
    folder = folder_of(models.source(name), settings.revision)
    if folder is None:
        return "the weights are not on this machine, so their profile is not known; name one with --profile FILE"
    none = (
        f"this machine has no profile of the weights in {folder}; paged-eviction prepare --model {name} measures one "
        "(if it has, loading renames tensors: name it with --profile FILE)"
    )
    if not profiles_of_shape(config):  # then the weights need not be read
        return none
    reason = register_files(folder, config)
    return f"the profile of {folder} was not looked for: {reason}; name one with --profile FILE" if reason else none
