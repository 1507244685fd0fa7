"""What recall is worth, from `recall.json` and `replacement.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table


def recall(_: str) -> str:
    """Accuracy by device bytes, and step times."""
    found = measured.load("recall")
    tables = [_accuracy(length, of) for length, of in found["accuracy"].items()]
    times = [
        (name, *(f"{of[name]:.0f}" for of in found["step_ms"].values()))
        for name in next(iter(found["step_ms"].values()))
    ]
    return (
        "Accuracy in % on the embedded model; `keydiff` chooses, blocks of 16. The budget is given in sixteenths of "
        "the prompt. Device bytes, summaries included, are a share of the full cache's. The question comes as a second "
        "turn (unknown) or with the prompt (known). `recall` asks for as many blocks as the budget has room for.\n\n"
        + "\n\n".join(tables)
        + "\n\nA box per block of 16 costs as much as a sixteenth of the cache, so recall has to be compared with "
        "dropping at the same bytes: there `keydiff` alone is as good or better on these prompts. Of a budget of four "
        "blocks only one can be asked for, and a vector in place of a box is too coarse for this model.\n\n"
        "What recall gives is that less has to be foreseen: with policies that keep the wrong tokens, dropping loses "
        f"what recall finds.\n\n{_policies(found['by_policy'])}\n\n"
        "Milliseconds of a decode step of that model (4 layers) behind so many tokens, on a machine that did other "
        "work too; the budget is a sixteenth, at least 128 tokens; 16 blocks are asked for, or as many as fit:\n\n"
        + table(("", *(f"{int(length):,}" for length in found["step_ms"])), times)
        + f"\n\n(`python benchmarks/recall.py`; {measured.machine('recall')}.)"
    )


def _accuracy(length: str, found: dict[str, Any]) -> str:
    shares, scores = found["device_share"], found["scores"]
    tasks = ", ".join(f"`{task}`" for task in next(iter(scores.values())))
    rows = [
        (name, f"{100 * shares[name]:.1f} %", *(_mean(scores[f"{name}, {place}"]) for place in ("unknown", "known")))
        for name in sorted(shares, key=lambda name: (shares[name], name))
    ]
    return f"{found['count']} prompts of {int(length):,} tokens of each of {tasks}:\n\n" + table(
        ("", "device bytes", "unknown", "known"), rows
    )


def _policies(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name.partition(", ")[0] for name in found["scores"]))
    scores = found["scores"]
    rows = [(f"`{name}`", *(_mean(scores[f"{name}, {way}"]) for way in ("drop", "recall"))) for name in names]
    return (
        f"Accuracy in % on {found['count']} prompts of 1,024 tokens of each task, question unknown, at 19 to 20 % of "
        "the device bytes of the full cache (dropping to 3/16, recall with 2/16):\n\n"
        + table(("policy", "drop", "recall"), rows)
    )


def _mean(scores: dict[str, float]) -> str:
    return f"{100 * sum(scores.values()) / len(scores):.0f}"


def replacement(_: str) -> str:
    """Faults on recorded traces."""
    found = measured.load("replacement")
    settings, faults = found["settings"], found["faults"]
    rows = [
        (f"`{name}`", f"{count:,}", f"{100 * count / settings['asked']:.1f} %")
        for name, count in sorted(faults.items(), key=lambda item: item[1])
    ]
    return (
        f"Faults on traces of the embedded model, which reads {settings['texts_used'] - 1} held-out texts of "
        f"{settings['tokens']} tokens; each token asks for {settings['blocks']} blocks, and there are "
        f"{settings['frames']} frames for them. `learned` was fitted to another text:\n\n"
        + table(("", "faults", "of what was asked for"), rows)
        + f"\n\n(`python benchmarks/replacement.py`; {measured.machine('replacement')}.)"
    )
