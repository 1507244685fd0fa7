"""What folding is worth, from `fold.json` and the kernels of the embedded model."""

from __future__ import annotations

import json
from typing import Any

import measured
from myst_text import table

from hf_paged_eviction_lab.fold import load_kernels
from hf_paged_eviction_eval import embedded


def fold(_: str) -> str:
    """Errors of attention, accuracy and perplexity by device bytes, and step times."""
    found = measured.load("fold")
    parts = [_errors(), *(_length(found, length) for length in found["accuracy"]), _times(found["step_ms"])]
    return "\n\n".join([*parts, f"({measured.experiment('fold')}; {measured.machine('fold')}.)"])


def _errors() -> str:
    kernels = load_kernels("embedded")
    errors = json.loads(kernels.facts["held_out_error"])
    rows = [
        (index, f"{dropped:.3f}", f"{folded:.3f}", f"{folded / dropped:.0%}")
        for index, (dropped, folded) in errors.items()
    ]
    return (
        "Squared error of the attention of each layer against that of the full cache, as a share of its square, on "
        f"windows that were held out from the fit (budgets {kernels.facts['budgets']}, `{kernels.policy}`):\n\n"
        + table(("layer", "dropping", "folding", "left of it"), rows)
    )


def _length(found: dict[str, Any], length: str) -> str:
    accuracy, perplexity = found["accuracy"][length], found["perplexity"][length]["values"]
    scores, shares = accuracy["scores"], found["device_share"][length]
    windows = found["perplexity"][length]["windows"]
    rows = []
    for name, share in shares.items():
        budget, disposal = name.split(" | ")
        cells = [_cell(scores[f"{name} | {place}"], disposal == "drop") for place in ("unknown", "known")]
        rows.append((budget, disposal, f"{100 * share:.1f} %", *cells, f"{perplexity[name]:.1f}"))
    full = " and ".join(f"{scores[f'full | {place}']['score']:.0f}" for place in ("unknown", "known"))
    return (
        f"{int(length):,} tokens: accuracy in %, mean of five tasks with {accuracy['count']} prompts each, in "
        "parentheses the difference to dropping at that budget and twice its standard error over prompts; and the "
        f"perplexity of {windows} windows of held-out text, in their second half. The full cache has {full}, "
        f"and a perplexity of {perplexity['full']:.1f}. Budgets are sixteenths of the length, device bytes those of a "
        "model of 16 bits, as a share of the full cache; nothing lies in host memory:\n\n"
        + table(("budget", "", "device bytes", "question unknown", "known", "perplexity"), rows)
    )


def _times(steps: dict[str, dict[str, float]]) -> str:
    rows = [(name, *(f"{of[name]:.1f}" for of in steps.values())) for name in next(iter(steps.values()))]
    return (
        "Milliseconds of a decode step of the embedded model behind so many tokens, with a budget of a sixteenth (the "
        "machine had other work: compare within a column only):\n\n"
        + table(("", *(f"{int(length):,}" for length in steps)), rows)
    )


def _cell(found: dict[str, float], is_base: bool) -> str:
    score = f"{found['score']:.0f}"
    return score if is_base else f"{score} ({found['gain']:+.1f} ± {found['noise']:.1f})"
