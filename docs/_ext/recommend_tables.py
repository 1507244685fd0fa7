"""How well `recommend` chooses, and the time to the first token."""

from __future__ import annotations

from typing import Any

from measured import RESULTS, experiment, load
from myst_text import table

from hf_paged_eviction_eval.bench.prefill.tables import (
    best_chunk,
    compared,
    heads,
    over_chunks,
    over_length,
    over_policies,
)

_MODELS = {"embedded": "the embedded model", "second": "a second model"}
_PREFILL = "paged-eviction bench --preset prefill --threads 1 --output benchmarks/results/prefill"


def recommend(_: str) -> str:
    """The choice beside the full grid, from `recommend.json`."""
    found = {_MODELS.get(name, name): each for name, each in sorted(load("recommend").items())}
    header = (
        *(
            "",
            "candidates",
            "passages",
            "tokens read",
            "of the full grid",
            "divergence of the choice",
            "best of the grid",
        ),
        *("above it", "within 2 % in other orders"),
    )
    rows = [[f"**{name}**", *_choice(each)] for name, each in found.items()]
    one = next(iter(found.values()))
    machine = f"{one['environment']['cpu']}, one thread, torch {one['environment']['torch']}"
    chosen = "; ".join(f"`{each['chosen']['candidate']}` for {name}" for name, each in found.items())
    return (
        table(header, rows, numbers_from=1)
        + f"\n\nChosen: {chosen}. The last column replays the search with its passages in "
        f"{one['other_orders']['orders']:,} other orders. ({experiment('recommend')}; standard-library sources "
        "that the models never saw. The second model, two layers with as many KV heads as query heads, is made by "
        f"`python -m training.second`; {machine}.)"
    )


def _choice(found: dict[str, Any]) -> list[str]:
    best, chosen, others = found["best"], found["chosen"], found["other_orders"]
    return [
        str(found["candidates"]),
        f"{found['passages']} of {found['settings']['length']}",
        f"{found['tokens']['search']:,}",
        f"{found['cost']:.1%}",
        f"{chosen['divergence']:.4f}",
        f"{best['divergence']:.4f}",
        f"{found['above_the_best']:.1%}",
        f"{others['within_2_percent']:.0%}",
    ]


def prefill_time(_: str) -> str:
    """Seconds over lengths, chunk sizes and policies, from `prefill/summary.json`."""
    if not (RESULTS / "prefill" / "summary.json").exists():
        return f"Not measured yet. This measures it:\n\n```bash\n{_PREFILL}\n```"
    found = load("prefill/summary")
    settings, where = found["settings"], found["environment"]
    longest = compared(found)
    threads = "one thread" if where["torch_threads"] == 1 else f"{where['torch_threads']} threads"
    return "\n\n".join(
        [
            "Seconds until the first token:",
            table(heads(found), over_length(found), numbers_from=1),
            f"(`{_PREFILL}`: a Llama of the shape `{settings['model']}` with random weights, policy "
            f"`{settings['policies'][0]}`; {where['cpu']}, {threads}, torch {where['torch']}, "
            f"transformers {where['transformers']}.)",
            f"Chunk sizes at {longest:,} tokens:",
            table(("chunk", "seconds"), over_chunks(found), numbers_from=1),
            f"The smallest chunk that is within 5 % of the fastest is **{best_chunk(found):,}**: take it unless memory "
            "is so short that fewer tokens beside the budget matter.",
            f"Policies at {longest:,} tokens in chunks of {settings['chunk']:,}:",
            table(("policy", "seconds"), over_policies(found), numbers_from=1),
        ]
    )
