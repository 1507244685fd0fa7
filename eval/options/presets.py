"""Named choices of options: `--preset NAME` fills in what was not given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class Preset:
    """Options that belong together.

    Attributes:
        models: each runs in turn, with a folder of its own below the output.
        options: values by the name of the option.
        parts: runs of each model by the name of their folder, with options of their own; one run where the user says
            any of these options himself.
    """

    models: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def runs(self, typed: set[str]) -> dict[str, dict[str, Any]]:
        """Options of each run by the end of its folder, without those that were given."""
        every = {name for options in self.parts.values() for name in options}
        parts = self.parts if self.parts and not every & typed else {"": {}}
        return {
            name: {key: value for key, value in {**self.options, **options}.items() if key not in typed}
            for name, options in parts.items()
        }


PRESETS = {
    "paper": Preset(
        # The setup of PagedEviction (arXiv 2509.04377): three Llama models, five tasks of LongBench, four policies and
        # the full cache. Baselines evict token by token as published, behind four sinks; blocks of three sizes.
        models=(
            "meta-llama/Llama-3.2-1B-Instruct",
            "meta-llama/Llama-3.2-3B-Instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
        ),
        options={
            "tasks": "hotpotqa,qasper,multifieldqa_en,gov_report,multi_news",
            "policies": "paged_eviction,streaming_llm,key_norm,keydiff",
            "budgets": "256,512,1024,2048,4096,full",
            "block_size": 16,
        },
        parts={
            "tokens": {"policies": "streaming_llm,key_norm,keydiff", "block_size": 1, "sink_tokens": 4},
            **{f"blocks_{size}": {"policies": "paged_eviction", "block_size": size} for size in (16, 8, 32)},
        },
    ),
    "thorough": Preset(
        # The built-in suite at three lengths, 128 questions each.
        options={"tasks": "suite", "length": "512,1024,2048", "limit": 128},
    ),
}


def get_preset(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
