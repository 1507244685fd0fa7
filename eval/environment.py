"""Where a run took place."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged_eviction


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "hf_paged_eviction": hf_paged_eviction.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def hardware(device: str, workers: int) -> dict[str, Any]:
    """The processor, and the accelerator if the run used one."""
    found: dict[str, Any] = {"cpu": cpu_name(), "cpu_threads": os.cpu_count(), "workers": workers}
    if torch.device(device).type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(torch.device(device))
    return found


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
