"""What `benchmarks/results` says of a policy or an allocator."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from writing import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
BLOCK, BUDGETS = 16, ("6%", "12.5%", "25%", "50%")


@cache
def load(name: str) -> dict[str, Any]:
    """The results of one benchmark."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def machine(name: str) -> str:
    """Where a benchmark ran."""
    return where(load(name)["environment"])


def experiment(name: str) -> str:
    """How a table cites a script that has done its work: the numbers stay, the script stands in the history."""
    return f"`benchmarks/{name}.py`, a finished experiment: `git log -- benchmarks/{name}.py`"


def where(environment: dict[str, Any]) -> str:
    """An environment in words."""
    return (
        f"{environment['cpu']}, {environment['torch_threads']} thread, torch {environment['torch']}, "
        f"transformers {environment['transformers']}"
    )


def measured_names() -> list[str]:
    """Policies in `policies.json`, such as "keydiff", "caote(h2o)" and "keydiff@pyramid"."""
    names = (name for run in load("policies")["runs"] for lines in run["budgets"].values() for name in lines)
    return list(dict.fromkeys(names))


def score(policy: str, question_known: bool, budget: str) -> tuple[float, float] | None:
    """Mean score of all tasks in percent, and its standard error; None if it was not measured."""
    for run in load("policies")["runs"]:
        if run["question_aware"] == question_known and run["block_size"] == BLOCK:
            numbers = run["budgets"].get(budget, {}).get(policy)
            return None if numbers is None else (100 * numbers[-2], 100 * numbers[-1])
    return None


def update_time(policy: str) -> float | None:
    """Microseconds of `update` of one layer per token, of those policies that were measured."""
    microseconds: dict[str, float] = load("update")["update_us"]
    return microseconds.get(policy)


def update(_: str) -> str:
    """What these times are of."""
    context = load("update")["settings"]
    return (
        f"Times of `update` are of one layer and token, victims included (`python benchmarks/update.py`: budget "
        f"{context['budget']}, 8 KV heads of 128; {machine('update')}). A `DynamicLayer` of as many tokens takes "
        f"{update_time('DynamicLayer ' + str(context['budget'])):.0f} µs."
    )


def decode(_: str) -> str:
    """Times of steps and of reading, from the newest row of each shape in `goals.jsonl`."""
    lines = (RESULTS / "goals.jsonl").read_text("utf-8").splitlines()
    newest = {shape: row for row in map(json.loads, lines) for shape in row["ratios"]}
    columns = {title: newest[shape] for shape, title in _SHAPES.items() if shape in newest}
    ratios = [newest[shape]["ratios"][shape] for shape in _SHAPES if shape in newest]
    names = list(dict.fromkeys(name for of_shape in ratios for name in of_shape))
    rows = [(name, *(f"{of_shape[name]:.2f}" if name in of_shape else "" for of_shape in ratios)) for name in names]
    machines = dict.fromkeys(f"{where(row)}, {row['compiler']}" for row in columns.values())
    return (
        table(("cache", *columns), rows, numbers_from=1)
        + "\n\n(`python benchmarks/goals.py`: random weights, 30 layers, one row, float32; the machine was shared; "
        f"{'; '.join(machines)}.)"
    )


#: Shapes of `benchmarks/goals.py`.
_SHAPES = {
    "tiny": "tiny model, 128 tokens",
    "smollm2": "shape of SmolLM2, 1,024 tokens",
    "reading": "the same, reading 8,192 tokens",
}


def lazy_reuse(_: str) -> str:
    """What dropping the victim at once would cost, from `lazy_reuse.json`."""
    results = load("lazy_reuse")
    rows = []
    for name, row in results["perplexity"].items():
        policy, _, budget = name.rpartition(" ")
        more, error = 100 * (row["at_once_over_lazy"] - 1), 100 * row["error"]
        rows.append((f"`{policy}`", budget, f"{more:+.1f}{_PLUS_MINUS}{error:.1f} %"))
    return (
        "Perplexity if the victim is dropped at once, against reusing it lazily, on the embedded model "
        f"({experiment('lazy_reuse')}):\n\n" + table(("policy", "budget", "change"), rows, numbers_from=2)
    )


def recent_tokens(_: str) -> str:
    """Perplexity and scores of tasks by `recent_tokens`, from `recent_tokens.json`."""
    results = load("recent_tokens")
    first, *others = results["settings"]["recent"]
    rows: dict[tuple[str, int, str], list[str]] = {}
    for row in results["perplexity"]:
        cell = f"{row['perplexity']:.1f}"
        if row["recent_tokens"] != first:
            cell = f"{100 * (row['ratio'] - 1):+.1f}{_PLUS_MINUS}{100 * row['ratio_error']:.1f} %"
        rows.setdefault((row["policy"], row["budget"], _WAYS[row["way"]]), []).append(cell)
    for row in results["tasks"]:
        cell = f"{100 * row['score']:.1f}"
        if row["recent_tokens"] != first:
            cell = f"{100 * row['gain']:+.1f}{_PLUS_MINUS}{100 * row['gain_error']:.1f}"
        rows.setdefault((row["policy"], row["budget"], "tasks"), []).append(cell)
    lines = [
        (f"`{policy}`", str(budget), what, *cells, *[""] * (1 + len(others) - len(cells)))
        for (policy, budget, what), cells in sorted(rows.items())
    ]
    return table(("policy", "budget", "measured", *map(str, (first, *others))), lines, numbers_from=3)


_WAYS = {"stream": "text, token by token", "chunks": "text, in chunks", "answer": "answers"}


def endless_text(_: str) -> str:
    """Perplexity of each lap of a text, from `endless_text.json`."""
    results = load("endless_text")
    settings, rows = results["settings"], []
    for run in results["runs"]:
        laps = run["perplexity_by_lap"]
        change = f"{100 * (laps[-1] / laps[0] - 1):+.1f} %"
        rows.append(
            [f"`{run['policy']}`", str(run["budget"]), run["positions"], *(f"{lap:.1f}" for lap in laps), change]
        )
    count = len(results["runs"][0]["perplexity_by_lap"])
    names = [f"tokens {lap * settings['lap']:,} to {(lap + 1) * settings['lap']:,}" for lap in range(count)]
    return (
        "Perplexity:\n\n"
        + table(("policy", "budget", "positions", *names, "change"), rows, numbers_from=3)
        + f"\n\n({experiment('endless_text')}; {settings['chunk']} tokens per forward; "
        f"{machine('endless_text')}.)"
    )


def positions(_: str) -> str:
    """What it costs to count positions in the cache, from `positions.json`."""
    results = load("positions")
    settings = results["settings"]
    rows = [
        [
            run["way"],
            f"{run['length']:,}",
            f"{run['step_ms']:.1f} ms",
            f"{run['step / text']:.3f}",
            f"{run['storage_bytes'] / 2**20:.0f} MiB",
        ]
        for run in results["results"]
    ]
    return (
        table(("positions", "tokens seen", "CPU time of a step", "relative to `text`", "storage"), rows, numbers_from=1)
        + f"\n\n({experiment('positions')}; a Llama of 100M parameters, budget {settings['budget']:,}, "
        f"`{settings['policy']}`, {settings['dtype']}; {machine('positions')}.)"
    )
