"""What a real model is like for a cache: sinks, channels, norms, the mean key, how near attention looks.

    python benchmarks/look_at_model.py --model results/models/SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2

reads texts with plain attention, writes the numbers into `benchmarks/results/look.json` under that name and draws them
as `notebooks/images/look_NAME.png`; `--page` writes the tables of all names into `docs/real_models/look.md`.
Without `--text` it reads modules of the standard library and pages of Python's documentation (`pydoc_data`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import RESULTS
from PIL import Image
from results_page import replace_section
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction_eval.data.texts import read_texts
from hf_paged_eviction_eval.models.environment import timed_on
from hf_paged_eviction_eval.models.loading import load
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.store.summaries.plot_style import COLOURS, finish, make_panels, policy_styles, save

IMAGES, PAGE, NUMBERS = Path("notebooks/images"), Path("docs/real_models/look.md"), RESULTS / "look.json"
#: Newest tokens, over whose attention is summed.
NEWEST = (1, 16, 64, 128, 256)
#: The first tokens of a text: where sinks are, if there are any.
FIRST = 4
SCORES = ("key_norm", "value_norm", "paged_eviction", "keydiff", "recency")


def default_texts(count: int) -> list[str]:
    """Documentation and code in turns."""
    from pydoc_data.topics import topics

    pages = sorted((text for text in topics.values() if len(text) > 6000), key=len)
    modules = [text.content for text in read_texts(()) if len(text.content) > 6000]
    return [text for pair in zip(pages, modules, strict=False) for text in pair][:count]


@torch.inference_mode()
def look(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Numbers `[layers, KV heads]` of one text `[1, tokens]`, by name; `newest` is `[layers, KV heads, NEWEST]`."""
    cache = DynamicCache()  # without a configuration: windowed layers keep all tokens, too
    attentions = model(ids, past_key_values=cache, output_attentions=True, logits_to_keep=1).attentions
    found: dict[str, list[Tensor]] = {}
    for layer, weights in zip(cache.layers, attentions, strict=True):
        for name, value in _of_layer(layer.keys[0].float(), layer.values[0].float(), weights[0].float()).items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def _of_layer(keys: Tensor, values: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Of one layer: keys and values `[KV heads, tokens, width]`, attention `[heads, tokens, tokens]`."""
    heads, tokens = keys.shape[:2]
    weights = weights.view(heads, -1, tokens, tokens).mean(1)
    half = tokens // 2
    late = weights[:, half:]  # queries that have much to choose from
    away = torch.arange(half, tokens)[:, None] - torch.arange(tokens)[None]
    key_norm, value_norm = keys.norm(dim=-1), values.norm(dim=-1)
    unit = keys / key_norm[..., None]
    channels = keys.abs().mean(1)
    rest = slice(FIRST, None)
    return {
        "sink": late[..., 0].mean(-1),
        "first": late[..., :FIRST].sum(-1).mean(-1),
        "newest": torch.stack([(late * (away < n)).sum(-1).mean(-1) for n in NEWEST], dim=-1),
        "sink_key": key_norm[:, 0] / key_norm[:, rest].median(-1).values,
        "sink_value": value_norm[:, 0] / value_norm[:, rest].median(-1).values,
        "channel": channels.max(-1).values / channels.median(-1).values,
        "mean_key": unit[:, rest].mean(1).norm(dim=-1),
        **_worth(key_norm, value_norm, unit, late, half),
    }


def _worth(key_norm: Tensor, value_norm: Tensor, unit: Tensor, late: Tensor, half: int) -> dict[str, Tensor]:
    """Rank correlation, over tokens of the first half without the sinks, of scores with the attention they get later.

    Worth is what a token adds to the output: attention of the second half's queries times the norm of the value.
    """
    span = slice(FIRST, half)
    received = late[..., span].mean(1)
    worth = received * value_norm[:, span]
    mean = unit.mean(1, keepdim=True)
    scores = {
        "key_norm": -key_norm[:, span],
        "value_norm": value_norm[:, span],
        "paged_eviction": value_norm[:, span] / key_norm[:, span],
        "keydiff": -(unit * mean / mean.norm(dim=-1, keepdim=True)).sum(-1)[:, span],
        "recency": torch.arange(half - FIRST).expand(len(worth), -1).float(),
    }
    return {f"worth_{name}": _rank_correlation(score, worth) for name, score in scores.items()}


def _rank_correlation(one: Tensor, other: Tensor) -> Tensor:
    """Spearman's, over the last dimension."""
    ranks = [values.argsort(-1).argsort(-1).double() for values in (one, other)]
    first, second = (rank - rank.mean(-1, keepdim=True) for rank in ranks)
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Means over texts, per layer and head."""
    settings = TaskSettings(
        policies=(), budgets=("full",), tasks=("passkey",), model=options.model, attn_implementation="eager"
    )
    model, tokenizer = load(settings)
    texts = [Path(name).read_text("utf-8") for name in options.text] or default_texts(options.limit)
    seen: list[dict[str, Tensor]] = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=options.length).input_ids
        seen.append(look(model, ids))
    means = {name: torch.stack([one[name] for one in seen]).mean(0) for name in seen[0]}
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return {
        "texts": len(texts),
        "length": options.length,
        "layers": kinds or ["full_attention"] * model.config.num_hidden_layers,
        "numbers": {name: _rounded(values.tolist()) for name, values in means.items()},
        "environment": timed_on(),
    }


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 4)


def draw(name: str, found: dict[str, Any]) -> Path:
    """Six panels over the layers: a dot per KV head, a line through their means."""
    figure, panels = make_panels(6, 3, (3.3, 2.4))
    numbers = found["numbers"]
    _line(panels[0], numbers["first"], f"first {FIRST} tokens", COLOURS[0])
    for colour, at in enumerate((1, 2, 4), 1):
        share = [[head[at] for head in layer] for layer in numbers["newest"]]
        _line(panels[1], share, f"newest {NEWEST[at]}", COLOURS[colour], dots=False)
    _line(panels[2], numbers["sink_key"], "key of token 0", COLOURS[3])
    _line(panels[2], numbers["sink_value"], "value of token 0", COLOURS[4])
    _line(panels[3], numbers["channel"], "largest key channel", COLOURS[5])
    _line(panels[4], numbers["mean_key"], "mean of unit keys", COLOURS[6])
    for score, style in policy_styles(SCORES).items():
        values = [fmean(layer) for layer in numbers[f"worth_{score}"]]
        panels[5].plot(range(len(values)), values, label=score, **(style | {"markersize": 3}))
    titles = (
        "share of attention",
        "share of attention",
        "norm, over the median",
        "over the median channel",
        "length, 1 = all alike",
        "rank correlation with worth",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        for at, kind in enumerate(found["layers"]):
            if kind != "full_attention":
                panel.axvspan(at - 0.5, at + 0.5, color="#eeeeee", linewidth=0, zorder=0)
    for panel in panels[:2]:
        panel.set_ylim(0, 1)
    panels[5].axhline(0, color="#555555", linewidth=0.8)
    path = IMAGES / f"look_{name}.png"
    save(finish(figure, panels, 3, "layer"), path)
    # A few flat colours: a quarter of the bytes.
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
    return path


def _line(panel: Any, values: list[list[float]], label: str, colour: str, dots: bool = True) -> None:
    panel.plot(range(len(values)), [fmean(layer) for layer in values], color=colour, label=label)
    if dots:
        places = [at for at, layer in enumerate(values) for _ in layer]
        panel.plot(places, [head for layer in values for head in layer], ".", color=colour, markersize=3, alpha=0.6)


def table(known: dict[str, Any]) -> str:
    """What the pictures show, in one number each: the mean over layers and KV heads, and the range of the heads."""
    rows = [("", *(f"`{name}`" for name in known)), ("---", *("---:" for _ in known))]
    wanted = (
        ("attention on the first token, %", "sink", 100),
        *((f"attention on the newest {n}, %", at, 100) for at, n in enumerate(NEWEST)),
        ("norm of the first token's key, over the median", "sink_key", 1),
        ("norm of its value, over the median", "sink_value", 1),
        ("largest key channel, over the median", "channel", 1),
        ("length of the mean of unit keys", "mean_key", 1),
        *((f"rank correlation of worth with `{score}`", f"worth_{score}", 1) for score in SCORES),
    )
    for label, name, scale in wanted:
        rows.append((label, *(_cell(found["numbers"], name, scale) for found in known.values())))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(numbers: dict[str, Any], name: str | int, scale: int) -> str:
    layers = numbers["newest"] if isinstance(name, int) else numbers[name]
    heads = [scale * (head[name] if isinstance(name, int) else head) for layer in layers for head in layer]
    digits = 0 if scale == 100 else 2
    return f"{fmean(heads):.{digits}f} ({min(heads):.{digits}f} to {max(heads):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--name", default="embedded")
    parser.add_argument("--page", action="store_true", help="measure nothing: draw what there is, and write the tables")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--length", type=int, default=768)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(NUMBERS.read_text("utf-8")) if NUMBERS.exists() else {}
    if not options.page:
        known[options.name] = measure(options)
        NUMBERS.write_text(json.dumps(known) + "\n", "utf-8")
    for name in known if options.page else [options.name]:
        print(f"drawn: {draw(name, known[name])}")
    if options.page:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "look", table(known)), "utf-8")


if __name__ == "__main__":
    main()
