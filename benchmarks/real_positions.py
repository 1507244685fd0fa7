"""Where in a text a cache loses: the divergence from the full cache over positions, a panel per kind of text."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image
from real_tables import by_variant, finished, load

from hf_paged_eviction_eval.store.summaries.plot_style import finish, make_panels, policy_styles, save

IMAGES = Path("notebooks/images")
SHOWN = ("auto", "tova", "snapkv", "streaming_llm", "paged_eviction", "random")
#: Of 1,024 tokens, so many bins make one point.
JOINED = 2
COLUMNS = 3


def draw_positions(name: str, share: str = "25%") -> Path | None:
    """Divergence per token by position, mean over the texts of a kind; None without rows."""
    rows, _ = finished(load(name, "text"))
    found = {policy: group for (policy, size), group in by_variant(rows).items() if size == share and policy in SHOWN}
    if not found:
        return None
    kinds = sorted({_kind(row) for group in found.values() for row in group})
    figure, panels = make_panels(len(kinds), COLUMNS, (3.3, 2.4), share_y=True)
    styles = policy_styles(found)
    for panel, kind in zip(panels, kinds, strict=True):
        for policy, group in found.items():
            mine = [row for row in group if _kind(row) == kind]
            ends, values = _points(mine)
            panel.plot(ends, values, label=policy, **(styles[policy] | {"markersize": 3}))
        panel.set_title(f"{kind} (n = {len(mine)})", fontsize=10)
        panel.axvline(256, color="#888888", linewidth=0.8, linestyle=":")
    path = IMAGES / f"text_{name}.png"
    save(finish(figure, panels, COLUMNS, "tokens read", "KL, nats per token"), path)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
    return path


def _kind(row: dict[str, Any]) -> str:
    return str(row["text"]).partition(".")[0]


def _points(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Tokens read at the middle of some bins, and the mean divergence there."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        width = row["tokens"] / len(row["count"])
        for at in range(0, len(row["count"]), JOINED):
            part = slice(at, at + JOINED)
            found[width * (at + JOINED / 2)].append(sum(row["kl"][part]) / sum(row["count"][part]))
    return list(found), [fmean(values) for values in found.values()]
