"""What merging is worth, from `merge.json` and `merge_steps.json`."""

from __future__ import annotations

import measured
from myst_text import table


def merge(_: str) -> str:
    """Accuracy beside dropping, and step times."""
    of = measured.load("merge")
    settings, found = of["settings"], of["found"]
    names = list(dict.fromkeys(name.rpartition(" | ")[0] for name in found if name.count(" | ") == 3))
    rows = []
    for name in names:
        host, budget, disposal = name.split(" | ")
        cells = [_cell(found[f"{name} | {place}"], disposal == "drop") for place in ("unknown", "known")]
        rows.append((host, budget, disposal, *cells))
    steps = measured.load("merge_steps")["step_ms"]
    times = [(f"`{name}`", *(f"{each[name]:.1f}" for each in steps.values())) for name in next(iter(steps.values()))]
    full = " and ".join(f"{found[f'full | {place}']['score']:.0f}" for place in ("unknown", "known"))
    return (
        f"Accuracy in % on the embedded model, mean of five tasks, {settings['count']} prompts of {settings['length']} "
        "tokens each, as below for recall; the budget is given in sixteenths of the prompt. In parentheses the "
        "difference to dropping, and twice its standard error over prompts. The full cache has "
        f"{full}:\n\n"
        + table(("policy", "budget", "disposal", "question unknown", "known"), rows)
        + "\n\nMilliseconds of a decode step of that model behind so many tokens, with a budget of a sixteenth (the "
        "machine had other work: compare within a column only):\n\n"
        + table(("", *(f"{int(length):,}" for length in steps)), times)
        + f"\n\n({measured.experiment('merge')}; {measured.machine('merge')}.)"
    )


def _cell(found: dict[str, float], is_base: bool) -> str:
    score = f"{found['score']:.0f}"
    return score if is_base else f"{score} ({found['gain']:+.1f} ± {found['noise']:.1f})"
