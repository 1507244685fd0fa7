"""Write the tables of `benchmarks/results/` into `docs/results.md`: `python benchmarks/tables.py`."""

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS
from goals import NOT_MEASURED
from results_page import PAGE, replace_section

from hf_paged_eviction_eval.bench.table import ratio_rows
from hf_paged_eviction_eval.bench.variants import FULL


def load(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return results


def where(results: dict[str, Any]) -> str:
    env = results["environment"]
    return f"{env['cpu']}, {env['torch_threads']} thread, torch {env['torch']}, transformers {env['transformers']}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bench(name: str) -> str:
    """Ratios and goals of `python benchmarks/goals.py NAME`."""
    results = load(f"bench_{name}/summary")
    settings, rows = results["settings"], results["rows"]
    versions, hardware = results["environment"]["versions"], results["environment"]["hardware"]
    cards = [f"{card['count']} x {card['name']}" for card in hardware["accelerators"]]
    threads = settings["machine"]["torch_threads"]
    cpu = f"{hardware['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
    place = cpu if settings["device"] == "cpu" or not cards else ", ".join(cards)
    ratios = [
        (pair, f"{context:,}", str(row["budget"]), str(row["batch_size"]), f"{value:.3f}")
        for row in groups(rows)
        for pair, context, value in ratio_rows(group_of(row, rows))
    ]
    goals = [
        (goal["goal"], goal["limit"], goal["shown"] or "", goal["verdict"] if goal["shown"] else NOT_MEASURED)
        for goal in results["goals"]
    ]
    parts = [
        f"**Decode step**, `python benchmarks/goals.py {name}`: model `{settings['model']}` with random weights, "
        f"medians of {settings['rounds']} interleaved rounds of {settings['steps']} tokens. *floor* is a DynamicCache "
        f"of budget tokens, *full* one that holds everything; *floor_compiled* is a StaticCache of budget tokens, and "
        f"the *static* ones are this cache, compiled the same way (*own*: with the attention implementation "
        f"`paged_eviction`, which needs no mask). {place}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}."
    ]
    if ratios:
        parts.append(table(("ratio of step times", "context", "budget", "batch", "measured"), ratios))
    parts.append(table(("goal", "limit", "measured", ""), goals))
    return "\n\n".join(parts)


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row of every budget and batch size whose decode steps were timed in turn."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "decode" and row["status"] == "measured":
            found.setdefault((row["budget"], row["batch_size"]), row)
    return list(found.values())


def group_of(first: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("kind", "budget", "batch_size")
    return [row for row in rows if all(row[name] == first[name] for name in names)]


def update() -> str:
    results = load("update")
    settings = results["settings"]
    others = (FULL, "DynamicLayer 2048", "DynamicLayer 4096")
    rows = [(name, f"{value:.0f}") for name, value in results["update_us"].items() if name not in others]
    return (
        f"**`update` of one layer** for one token, `python benchmarks/update.py`: 8 KV heads of 128, budget "
        f"{settings['budget']}, context {settings['context']}, choice of victims included. {where(results)}.\n\n"
        + table(("policy", "µs per token"), rows)
    )


def observe() -> str:
    results = load("observe")
    settings = results["settings"]
    rows = [
        (f"`{policy}`", f"{row['ratio']:.3f}", f"{row['extra_memory']:.1%}") for policy, row in results["rows"].items()
    ]
    return (
        "**Policies that decide by attention**, `python benchmarks/observe.py`: a decode step of the same model in the "
        f"attention implementation `paged_eviction`, budget {settings['budget']}, float32, medians of "
        f"{settings['rounds']} interleaved rounds; goals: 1.05 and 2 %. Memory is that of statistics and kept queries, "
        f"just before a block is full, as a share of keys and values. {where(results)}.\n\n"
        + table(("policy", "step time / `paged_eviction`", "extra memory"), rows)
    )


def prefill_memory() -> str:
    results = load("prefill_memory")
    settings = results["settings"]
    rows = [
        (name, f"{row['peak_bytes'] / 2**20:.1f}", f"{row['peak_tokens']:.0f}", f"{row['held_tokens_after']:.0f}")
        for name, row in results["rows"].items()
    ]
    return (
        f"**Peak KV memory of a prefill** of {settings['tokens']:,} tokens, `python benchmarks/prefill_memory.py`: "
        f"budget {settings['budget']}, chunks of {settings['chunk']}, {settings['layers']} layers, every live tensor "
        f"of the shape of keys or values counted; goal: at most 1.1 x (budget + chunk) = "
        f"{1.1 * (settings['budget'] + settings['chunk']):.0f} tokens. kvpress 0.5.5 needs transformers below 5.3, so "
        f"all rows ran there. {where(results)}.\n\n"
        + table(("cache", "peak, MiB", "peak, tokens per layer", "held afterwards"), rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    options = parser.parse_args()
    on_gpu = (RESULTS / "bench_h200" / "summary.json").exists()
    note = [
        "All on a CPU. Nothing here has been measured on a GPU yet: `python benchmarks/goals.py h200`, or all of "
        "`make gpu`, measures it on one H200."
    ]
    steps = [bench("cpu"), *([bench("h200")] if on_gpu else [])]
    more = ["<details><summary>Time of an update, policies that decide by attention, memory of a prefill</summary>"]
    more += [update(), observe(), prefill_memory(), "</details>"]
    content = "\n\n".join([*([] if on_gpu else note), *steps, *more])
    text = options.page.read_text("utf-8")
    options.page.write_text(replace_section(text, "benchmarks", content), "utf-8")


if __name__ == "__main__":
    main()
