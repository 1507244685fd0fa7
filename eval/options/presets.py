"""`--preset paper`: the set-up of PagedEviction (arXiv 2509.04377) fills in what was not given.

Three Llama models, five tasks of LongBench, four policies and the full cache. Baselines evict token by token as
published, behind four sinks; blocks of three sizes.
"""

from __future__ import annotations

from typing import Any

#: Each runs in turn, with a folder of its own below the output.
MODELS = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
)
_OPTIONS = {
    "tasks": "hotpotqa,qasper,multifieldqa_en,gov_report,multi_news",
    "policies": "paged_eviction,streaming_llm,key_norm,keydiff",
    "budgets": "256,512,1024,2048,4096,full",
    "block_size": 16,
}
#: Runs of each model by the name of their folder, with options of their own.
_PARTS: dict[str, dict[str, Any]] = {
    "tokens": {"policies": "streaming_llm,key_norm,keydiff", "block_size": 1, "sink_tokens": 4},
    **{f"blocks_{size}": {"policies": "paged_eviction", "block_size": size} for size in (16, 8, 32)},
}


def paper_runs(typed: set[str]) -> dict[str, dict[str, Any]]:
    """Options of each run of a model by its folder, without those that were given.

    Where the user says any of the options that tell the runs apart, there is one run.
    """
    parts = {"": {}} if typed & {name for options in _PARTS.values() for name in options} else _PARTS
    return {
        name: {key: value for key, value in {**_OPTIONS, **options}.items() if key not in typed}
        for name, options in parts.items()
    }
