"""Perplexity of a text that never ends: `python benchmarks/endless_text.py --help`.

The embedded model reads the held-out library source again and again, far past its window, under several policies, with
the tokens held at their places in the text and one after the other in the cache. No cache here can remember an earlier
lap, so laps differ by their positions alone: perplexity is flat if every lap has that of the first.

Results are written after each run; what is there already is not run again.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.summaries.plot_style import finish, make_panels, policy_styles
from hf_paged_eviction_eval.summaries.plot_style import save as save_figure
from hf_paged_eviction_eval.tasks import held_out_texts

NAME = "endless_text"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / f"{NAME}.svg"
#: Options of the cache beside its budget.
POLICIES: dict[str, dict[str, Any]] = {
    "recency": {"policy": "recency", "sink_tokens": 0},
    "streaming_llm": {"policy": "streaming_llm", "sink_tokens": 4},
    "keydiff": {"policy": "keydiff"},
}


def held_out_tokens(tokenizer: Any) -> Tensor:
    """`[tokens]` of all held-out modules, one after the other."""
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in held_out_texts().values()]
    return torch.tensor([token for text in ids for token in text])


@torch.inference_mode()
def stream(model: Any, lap: Tensor, tokens: int, chunk: int, bins: int, **options: Any) -> dict[str, Any]:
    """Loss, number of tokens and seconds for each part of each lap.

    Args:
        lap: `[tokens]`, read again and again.
        tokens: how many are read in all.
        chunk: tokens per forward.
        bins: parts of a lap.
        options: of the cache.
    """
    cache = PagedEvictionCache(model.config, **options)
    count = math.ceil(tokens * bins / len(lap))
    loss, counted, seconds = [0.0] * count, [0] * count, [0.0] * count
    bytes_held = 0
    for start in range(0, tokens, chunk):
        at = torch.arange(start, min(start + chunk, tokens) + 1)
        ids = lap[at % len(lap)]
        began = time.perf_counter()
        logits = model(
            input_ids=ids[None, :-1], position_ids=at[None, :-1], past_key_values=cache, use_cache=True
        ).logits
        spent = time.perf_counter() - began
        place = start * bins // len(lap)
        loss[place] += float(cross_entropy(logits[0].float(), ids[1:], reduction="sum"))
        counted[place] += len(ids) - 1
        seconds[place] += spent
        bytes_held = max(bytes_held, cache.stats().storage_bytes) if start % (64 * chunk) == 0 else bytes_held
    return {
        "tokens": tokens,
        "storage_bytes": bytes_held,
        "loss": [round(value, 4) for value in loss],
        "count": counted,
        "seconds": [round(value, 3) for value in seconds],
    }


def by_lap(run: dict[str, Any], bins: int) -> list[float]:
    """Perplexity of each whole lap."""
    whole = len(run["loss"]) // bins
    if sum(run["count"]) < run["lap"] * whole:
        whole -= 1
    parts = [slice(lap * bins, (lap + 1) * bins) for lap in range(whole)]
    return [round(math.exp(sum(run["loss"][part]) / sum(run["count"][part])), 2) for part in parts]


def draw(runs: list[dict[str, Any]], bins: int, window: int) -> None:
    """One panel per budget: perplexity of every tenth of a lap against the position."""
    budgets, together = sorted({run["budget"] for run in runs}), max(bins // 10, 1)
    styles = policy_styles(run["policy"] for run in runs)
    figure, panels = make_panels(len(budgets), len(budgets), (7.0, 3.6), share_y=True)
    for axes, budget in zip(panels, budgets, strict=True):
        for run in (run for run in runs if run["budget"] == budget):
            starts = range(0, len(run["loss"]) - together + 1, together)
            places = [(start + together / 2) * run["lap"] / bins / 1000 for start in starts]
            parts = [slice(start, start + together) for start in starts]
            values = [math.exp(sum(run["loss"][part]) / sum(run["count"][part])) for part in parts]
            text = run["positions"] == "text"
            style = styles[run["policy"]] | {"markersize": 4, "linestyle": "--" if text else "-"}
            axes.plot(places, values, label=f"{run['policy']}, {run['positions']}", alpha=0.6 if text else 1, **style)
        axes.axvline(window / 1000, color="#555555", linewidth=1, linestyle=":")
        axes.annotate(" window", (window / 1000, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{budget} tokens held", fontsize=11)
    finish(figure, panels, len(budgets), "position in the text (thousands of tokens)", "perplexity")
    with PICTURE.open("wb") as file:
        save_figure(figure, file)
    print(f"written: {PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--budgets", nargs="+", type=int, default=[256])
    parser.add_argument("--lap", type=int, default=51200, help="tokens of the text")
    parser.add_argument("--laps", type=int, default=2, help="how often it is read")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--bins", type=int, default=50, help="parts of a lap")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = embedded.load()
    lap = held_out_tokens(tokenizer)[: options.lap]
    window = model.config.max_position_embeddings
    settings = {name: value for name, value in vars(options).items() if name in ("chunk", "bins")}
    settings |= {"lap": len(lap), "window": window}
    path = RESULTS / f"{NAME}.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    runs: list[dict[str, Any]] = found["runs"] if found.get("settings") == settings else []
    tokens = options.laps * len(lap)
    for budget in options.budgets:
        for policy in options.policies:
            for positions in ("text", "cache"):
                about = {"policy": policy, "positions": positions, "budget": budget}
                if any(about.items() <= run.items() and run["tokens"] >= tokens for run in runs):
                    continue
                cache = {**POLICIES[policy], "budget": budget, "positions": positions}
                run = {**about, "lap": len(lap), **stream(model, lap, tokens, options.chunk, options.bins, **cache)}
                run["perplexity_by_lap"] = by_lap(run, options.bins)
                runs = [other for other in runs if not about.items() <= other.items()] + [run]
                print(about, run["perplexity_by_lap"], flush=True)
                save(NAME, {"settings": settings, "runs": runs})
    draw(runs, options.bins, window)


if __name__ == "__main__":
    main()
