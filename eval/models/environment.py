"""Where a run took place, and with what."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import hf_paged_eviction

#: Packages whose version may change a number.
PACKAGES = "transformers torch tokenizers accelerate datasets evaluate jieba".split()


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None for what is not installed."""
    return {
        "hf_paged_eviction": hf_paged_eviction.__version__,
        **{name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(folder: Path | None = None) -> str | None:
    """The commit that a package was installed from, "-dirty" behind it if files were changed.

    Args:
        folder: of the package; this one if not given.

    Returns:
        None unless the package's own files are in a git repository.
    """
    here = folder or Path(hf_paged_eviction.__file__).resolve().parent
    # A package that lies in an environment inside of some repository is not a part of it.
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(here, "rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git(here, "status", "--porcelain", "--untracked-files=no", "..") else head


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def hardware(processes: int) -> dict[str, Any]:
    """The processor, its memory in bytes, and all accelerators in sight by name and number.

    Args:
        processes: that the run was split over.
    """
    return {
        "cpu": cpu_name(),
        "cpu_threads": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": accelerators(),
        "processes": processes,
    }


def accelerators() -> list[dict[str, Any]]:
    """Name, number and memory in bytes of each kind of accelerator."""
    counts: Counter[tuple[str, int | None]] = Counter()
    if torch.cuda.is_available():
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        counts.update((card.name, card.total_memory) for card in cards)
    elif torch.accelerator.is_available():
        counts[best_device(), None] = torch.accelerator.device_count()
    return [{"name": name, "count": count, "memory_bytes": memory} for (name, memory), count in counts.items()]


def best_device() -> str:
    """The accelerator of this machine, or the CPU."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def model_facts(model: Any) -> dict[str, Any]:
    """What was really used: attention, precision, place and size of a loaded model."""
    return {
        "class": type(model).__name__,
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "commit": getattr(model.config, "_commit_hash", None),
        "context": getattr(model.config, "max_position_embeddings", None),
    }
