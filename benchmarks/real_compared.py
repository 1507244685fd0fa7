"""Policies side by side over all that they were run on, whichever table it was for: the summary of the real models."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import leaderboard
from common import RESULTS
from real_tables import (
    EIGHTH,
    QUARTER,
    answered,
    apart,
    by_variant,
    cell,
    divergence,
    finished,
    grid,
    late,
    once,
    percent,
    piped,
    question,
)

#: What a cache is in these tables: a policy and the tokens of its blocks.
Cache = tuple[str, int]
#: What the default was before it looked at queries: its rows of that time bear this name.
FORMER = "calibrated@global"
DEFAULT: tuple[Cache, ...] = (("auto", 16), (FORMER, 16))
BESIDE: tuple[Cache, ...] = (
    *DEFAULT,
    ("auto", 4),
    (FORMER, 4),
    ("self_calibrated@global", 16),
    ("paged_eviction", 16),
    ("tova", 16),
    ("snapkv", 16),
)
#: Scores of 2026 and what they stand beside.
NEWEST = ("gate:smollm2-kvzip.safetensors@global", "vase(tova)", "vase(snapkv)")
#: Shares of the prompt by the names of budgets: of needles' prompts, about 890 tokens, and of texts.
SHARES = {"56": "6 %", "112": "12.5 %", "224": "25 %", "448": "50 %"}
SHARES |= {f"{share}%": f"{share} %" for share in ("6", "12.5", "25", "50")}
#: What stands beside kvpress.
PRESSED = (*(policy for policy, _ in BESIDE), "expected_attention", "keydiff", "kvzip@global", "leverage", NEWEST[0])
#: An eighth and a quarter, and room for about 40 tokens of question and answer, which kvpress holds besides.
BESIDES = ("152", "264")
#: Settings that make another protocol.
_OTHER = ("heads", "max_length", "suite")
#: By bits of a number, the tokens that are held of needles' prompts. Tables ask for these.
TOKENS = {
    16: ("56", "112", "224"),
    8: ("64", "160", "368"),
    4: ("112", "192", "320", "560", "720"),
    2: ("208", "560", "1024"),
}
#: By model: numbers per token in each layer that evicts, how many such layers there are, and the bytes of the others:
#: 15 of Gemma's hold the newest 511 tokens in float32.
SHAPES = {"smollm2": (3 * 2 * 64, 30, 0), "gemma3": (1 * 2 * 256, 3, 15 * 511 * 2 * 256 * 4)}
#: Tokens of which few bits hold a copy as they came: four first ones, the newest block, and the mean and the sizes of
#: channels that all of them share.
AS_THEY_CAME = 4 + 16 + 2


def compared(name: str, caches: Sequence[Cache], decide: Collection[str] = ()) -> str:
    """Nats lost in text, and needles that are kept with the question unknown and known: three tables.

    Args:
        decide: policies over whose questions they are; none = over those of most rows.
    """
    parts = []
    for title, of, known in (
        ("Running text, nats lost", "texts", None),
        ("Needles, question unknown, right in %", "tasks", False),
        ("Needles, question known, right in %", "tasks", True),
    ):
        found, full = _same(name, caches, of, known, decide)
        if not found:
            continue
        if of == "texts":
            cells = {key: cell([_lost(row, full) for row in group], 3) for key, group in found.items()}
            far = {key: cell([late(row, "kl") for row in group], 3) for key, group in found.items()}
        else:
            cells = {key: percent(group) for key, group in found.items()}
            far = {key: apart(group, 3) for key, group in found.items()}
        order = _order(caches, found)
        parts.append(f"{title} (n = {len(full)}):\n\n{grid(_sorted(cells), order)}")
        title = "KL divergence from the full cache, nats per token"
        parts.append(f"<details><summary>{title}</summary>\n\n{grid(_sorted(far), order)}\n\n</details>")
    return "\n\n".join(parts)


def over_bytes(
    known: bool, policies: Sequence[str] = (FORMER, "calibrated", "tova", "keydiff"), name: str = "smollm2"
) -> str:
    """Needles: policies, bits and tokens, with the bytes that they took, those of 16 bits as in bfloat16."""
    rows, bits = [], {}
    for protocol, row in _rows(name, "tasks", known):
        many = int(protocol.get("bits") or 16)
        if row["policy"] == "full":
            rows.append(row)
        elif row["policy"] in policies and protocol["block_size"] == 16 and row["budget"] in TOKENS[many]:
            rows.append(row | {"policy": (label := f"{row['policy']}, {many} bits")})
            bits[label] = row["policy"], many
    few = {(row["policy"], row["budget"]) for row in rows if bits.get(row["policy"], ("", 16))[1] < 16}
    found, full = _finished(rows, few or None)
    lines = [("policy", "bits", "tokens", "bytes, % of the full cache", "right, %", "KL"), ("---", *["---:"] * 5)]
    for (label, tokens), group in sorted(
        found.items(), key=lambda item: (bits[item[0][0]][0], _bytes(name, item[1], bits[item[0][0]][1]))
    ):
        policy, many = bits[label]
        took = f"{100 * _bytes(name, group, many):.1f}"
        lines.append((f"`{policy}`", str(many), tokens, took, percent(group), apart(group, 3)))
    table = piped(lines)
    return f"{len(full)} prompts that the full cache answers:\n\n{table}" if found else "No rows."


def _bytes(name: str, group: Sequence[dict[str, Any]], bits: int) -> float:
    """Mean share of the bytes of the whole prompt in bfloat16. Everything was computed in float32."""
    numbers, layers, others = SHAPES[name]
    shares = []
    for row in group:
        if bits == 16 or "kv_bytes" not in row:
            shares.append(row["budget_tokens"] / row["prompt_tokens"])
        else:
            took = (row["kv_bytes"] - others) / layers - AS_THEY_CAME * numbers * 2
            shares.append(took / (row["prompt_tokens"] * numbers * 2))
    return fmean(shares)


def beside_kvpress(name: str = "smollm2") -> str:
    """kvpress and our policies on the same needles, question unknown: ours first, and those that diverge least."""
    path = RESULTS / f"kvpress_{name}.json"
    theirs = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    asked = {(row["task"], row["id"]) for row in theirs if row["press"] == "full" and row["score"] == 1}
    found: dict[tuple[bool, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in theirs:
        if (row["task"], row["id"]) in asked and row["tokens"]:
            kept = {"score": row["score"], "agreement": {"kl": row["kl"]}}
            found[True, row["press"], str(row["tokens"])].append(kept)
    plain = (row for known, row in _rows(name, "tasks", False) if known["block_size"] == 16 and not known.get("bits"))
    for row in once(row for row in plain if (row["task"], row["id"]) in asked):
        if row["policy"] in PRESSED and row["budget"] in (EIGHTH, QUARTER, *BESIDES):
            found[False, row["policy"], row["budget"]].append(row)
    lines = [("", "tokens", "right, %", "KL"), ("---", *["---:"] * 3)]
    for (other, policy, tokens), group in sorted(
        found.items(), key=lambda item: (item[0][0], item[0][2], divergence(item[1]))
    ):
        if len(group) == len(asked):
            lines.append((f"{'kvpress: ' * other}`{policy}`", tokens, percent(group), apart(group, 3)))
    return f"n = {len(asked)}:\n\n" + piped(lines)


def _same(
    name: str, caches: Sequence[Cache], of: str, known: bool | None, decide: Collection[str]
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[Any, dict[str, Any]]]:
    """Rows by cache and share, over the same questions; the full cache's rows, by question."""
    rows = []
    for protocol, row in _rows(name, of, known):
        cache = row["policy"], protocol["block_size"]
        if protocol.get("bits"):
            continue
        if row["policy"] == "full":
            rows.append(row)
        elif cache in caches and row["budget"] in SHARES:
            rows.append(row | {"policy": _label(cache), "budget": SHARES[row["budget"]]})
    return _finished(rows, {(row["policy"], row["budget"]) for row in rows if row["policy"] in decide} or None)


def _finished(
    rows: Sequence[dict[str, Any]], among: Collection[tuple[str, str]] | None = None
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[Any, dict[str, Any]]]:
    same, _ = finished(once(rows), among)
    return by_variant(same), {question(row): row for row in same if row["policy"] == "full"}


def _rows(name: str, of: str, known: bool | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each with its protocol; of tasks, those of prompts that the full cache answers."""
    for _, protocol, group in leaderboard.tables():
        if protocol is not None and _fits(protocol, name, of, known):
            for row in group if of == "texts" else answered(group):
                yield protocol, row


def _fits(protocol: dict[str, Any], name: str, of: str, known: bool | None) -> bool:
    """Whether a protocol is the one of these tables, but for the size of blocks."""
    if (protocol["model"], protocol["of"]) != (name, of) or any(protocol.get(each) for each in _OTHER):
        return False
    return protocol.get("question_aware") == known if of == "tasks" else protocol.get("chunk") == 64


def _label(cache: Cache) -> str:
    policy, size = cache
    return policy if size == 16 else f"{policy}, blocks of {size}"


def _lost(row: dict[str, Any], full: dict[Any, dict[str, Any]]) -> float:
    return late(row, "loss") - late(full[question(row)], "loss")


def _sorted(cells: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """The smallest share first."""
    return dict(sorted(cells.items(), key=lambda item: float(item[0][1].split()[0])))


def _order(caches: Iterable[Cache], found: Iterable[tuple[str, str]]) -> dict[str, float]:
    """As they are listed, those that have rows."""
    labels = {policy for policy, _ in found}
    return {_label(cache): float(at) for at, cache in enumerate(caches) if _label(cache) in labels}
