"""How well `recommend` chooses."""

from __future__ import annotations

from typing import Any

from measured import experiment, load
from myst_text import table

_MODELS = {"embedded": "the embedded model", "second": "a second model"}


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
