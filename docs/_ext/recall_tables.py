"""What recall is worth, from `recall.json` and `replacement.json`."""

from __future__ import annotations

import measured
from myst_text import table


def recall(_: str) -> str:
    """Accuracy by device bytes, and step times."""
    found = measured.load("recall")
    settings, shares = found["settings"], found["device_share"]
    tasks = list(next(iter(found["scores"].values())))
    rows = [
        (name, f"{100 * shares[name]:.1f} %", *(_mean(found["scores"][f"{name}, {place}"]) for place in _PLACES))
        for name in sorted(shares, key=lambda name: (shares[name], name))
    ]
    times = [
        (name, *(f"{of[name]:.1f}" for of in found["step_ms"].values()))
        for name in next(iter(found["step_ms"].values()))
    ]
    return (
        f"Accuracy in % on the embedded model, mean of {', '.join(f'`{task}`' for task in tasks)}, {settings['count']} "
        f"prompts of {settings['length']} tokens each; `keydiff` chooses, blocks of 16. The budget is given in "
        "sixteenths of the prompt. Device bytes, summaries included, are a share of the full cache's. The question "
        "comes as a second turn (unknown) or with the prompt (known). `recall` asks for as many blocks as fit:\n\n"
        + table(("", "device bytes", "unknown", "known"), rows)
        + "\n\nSo a box per block of 16 costs as much as a sixteenth of the cache, and recall has to be compared with "
        "dropping at the same bytes.\n\n"
        "Milliseconds of a decode step of that model (4 layers, 2 KV heads of 32) behind so many tokens; budget a "
        "sixteenth, at least 128 tokens; 16 blocks asked for, or as many as fit:\n\n"
        + table(("", *(f"{int(length):,}" for length in found["step_ms"])), times)
        + f"\n\n(`python benchmarks/recall.py`; {measured.machine('recall')}.)"
    )


_PLACES = ("unknown", "known")


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
