"""What recall is worth, from `recall.json`, `recall_bytes.json` and `recall_shape.json`."""

from __future__ import annotations

from typing import Any

import measured
from writing import table


def recall(_: str) -> str:
    """Accuracy by device bytes, and step times."""
    results = measured.load("recall")
    tables = [_accuracy(length, of) for length, of in results["accuracy"].items()]
    times = [
        (name, *(f"{of[name]:.0f}" for of in results["step_ms"].values()))
        for name in next(iter(results["step_ms"].values()))
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
        f"what recall finds.\n\n{_policies(results['by_policy'])}\n\n"
        "Milliseconds of a decode step of that model (4 layers) after so many tokens, on a busy machine; the "
        "budget is a sixteenth, at least 128 tokens; 16 blocks are asked for, or as many as fit:\n\n"
        + table(("", *(f"{int(length):,}" for length in results["step_ms"])), times)
        + f"\n\n({measured.experiment('recall')}; {measured.machine('recall')}.)"
    )


def _accuracy(length: str, results: dict[str, Any]) -> str:
    shares, scores = results["device_share"], results["scores"]
    tasks = ", ".join(f"`{task}`" for task in next(iter(scores.values())))
    rows = [
        (name, f"{100 * shares[name]:.1f} %", *(_mean(scores[f"{name}, {place}"]) for place in ("unknown", "known")))
        for name in sorted(shares, key=lambda name: (shares[name], name))
    ]
    return f"{results['count']} prompts of {int(length):,} tokens of each of {tasks}:\n\n" + table(
        ("", "device bytes", "unknown", "known"), rows
    )


def _policies(results: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name.partition(", ")[0] for name in results["scores"]))
    scores = results["scores"]
    rows = [(f"`{name}`", *(_mean(scores[f"{name}, {way}"]) for way in ("drop", "recall"))) for name in names]
    return (
        f"Accuracy in % on {results['count']} prompts of 1,024 tokens of each task, question unknown, at 19 to 20 % of "
        "the device bytes of the full cache (dropping to 3/16, recall with 2/16):\n\n"
        + table(("policy", "drop", "recall"), rows)
    )


def _mean(scores: dict[str, float]) -> str:
    return f"{100 * sum(scores.values()) / len(scores):.0f}"


def same_bytes(_: str) -> str:
    """Dropping, four bits and recall at the same device bytes."""
    results = measured.load("recall_bytes")
    tables = [_same_bytes(int(length), of) for length, of in results["lengths"].items()]
    return "\n\n".join([*tables, f"({measured.experiment('recall_bytes')}; {measured.machine('recall_bytes')}.)"])


def _same_bytes(length: int, results: dict[str, Any]) -> str:
    ways = results["variants"]
    tasks = ", ".join(f"`{task}`" for task in ways["full"]["scores"])
    rows = [
        (
            name.replace("recall, ahead", "recall, fetched ahead"),
            _mean(of["scores"]),
            *(f"{100 * of[share]:.1f} %" if of[share] else "" for share in ("device_share", "host_share")),
            f"{of['step_ms']:.0f}",
            f"{100 * of['fetched_share']:.1f} %" if of["fetched_share"] else "",
        )
        for name, of in ways.items()
    ]
    columns = ("", "accuracy", "device bytes", "host bytes", "step, ms", "fetched per step")
    return (
        f"{length:,} tokens, {results['count']} prompts of each of {tasks}; `{results['recall']}`:\n\n"
        f"{table(columns, rows)}\n\nOf the blocks that came back, "
        f"{100 * ways['keydiff, recall, ahead']['foreseen']:.0f} % had been fetched ahead (`prefetch`)."
    )


def shape(_: str) -> str:
    """Step times at the layer shape of a larger model."""
    results = measured.load("recall_shape")
    first = next(iter(results["lengths"].values()))
    rows = [
        (
            name.replace("recall, ahead", "recall, fetched ahead"),
            *(
                text
                for of in results["lengths"].values()
                for text in (
                    f"{of[name]['layer_ms']:.0f}",
                    f"{of[name]['device_bytes'] / 2**20:.1f}",
                    f"{of[name]['host_bytes'] / 2**20:.0f}" if of[name]["host_bytes"] else "",
                )
            ),
        )
        for name in first
    ]
    columns = [""]
    for length in results["lengths"]:
        columns += [f"{int(length) // 1024}k: ms", "device MiB", "host MiB"]
    return f"{table(columns, rows)}\n\n({measured.experiment('recall_shape')}; {measured.machine('recall_shape')}.)"
