"""Settings with a name."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from .methods import METHODS
from .settings import Prefill, Throughput
from .variants import FLOOR, FULL, PAGED

PAPER, PREFILL, QUICK = "paper", "prefill", "quick"
#: Shapes of the models that arXiv 2509.04377 measured.
PAPER_MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")

PRESETS: dict[str, dict[str, Any]] = {
    PAPER: {
        "model": "llama-3.2-1b",
        "contexts": (),
        "variants": (FULL, *METHODS),
        "throughput": Throughput(budgets=(256, 512, 1024, 2048, 4096)),
    },
    PREFILL: {"model": "prefill", "contexts": (), "variants": (), "prefill": Prefill()},
    QUICK: {
        "contexts": (2048,),
        "budgets": (256,),
        "steps": 16,
        "rounds": 3,
        "variants": (FLOOR, PAGED, FULL),
        "throughput": Throughput(requests=2, input_tokens=512, output_tokens=32, budgets=(256,)),
        "prefill": Prefill(lengths=(2048,), chunk=256, chunks=(), policies=("paged_eviction",), rounds=1),
    },
}


def get_preset(name: str | None) -> dict[str, Any]:
    """The settings of a preset; none for None.

    Raises:
        UserError: there is no such preset.
    """
    if name is None:
        return {}
    if name not in PRESETS:
        raise UserError(f"unknown --preset {name}; choose from {', '.join(PRESETS)}")
    return dict(PRESETS[name])
