"""A trace of some steps of every variant, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...store.results import cannot_write
from ..settings import BenchSettings
from .compiling import room_for_graphs
from .decoding import Group
from .peak import no_messages

#: Enough to see one step next to another.
_STEPS = 4


def write_trace(model: Any, settings: BenchSettings, path: Path) -> None:
    """Trace every variant at every context, of the first budget and batch size, each under its name.

    Raises:
        UserError: the file cannot be written.
    """
    group = Group(model, settings, settings.budgets[0], settings.batch_sizes[0], 1.0, lambda _: None)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with room_for_graphs():
        group.prepare()
        with no_messages(), profile(activities=activities) as seen:
            for lane, decoder in group.decoders.items():
                context = "" if lane.context is None else f", context {lane.context}"
                with record_function(f"{lane.variant}{context}"):
                    decoder.run(_STEPS)
        group.forget()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path))
    except OSError as error:
        raise cannot_write(path, error) from error
