"""What fitted values and biases are worth, from `attention_matching_smollm2.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table

_NAMES = {"drop": "as they came", "values": "values fitted", "biases": "biases fitted", "both": "values and biases"}
_KINDS = {"needles": "Needles", "records": "LongBench records"}


def matching(_: str) -> str:
    """A table for needles and one for records."""
    found = measured.load("attention_matching_smollm2")
    parts = [_kind(found["rows"], kind) for kind in _KINDS]
    return "\n\n".join([*parts, f"({measured.machine('attention_matching_smollm2')}.)"])


def _kind(rows: list[dict[str, Any]], kind: str) -> str:
    own = [row for row in rows if row["kind"] == kind]
    own.sort(key=lambda row: (-row["share"], row["bits"] or 16, row["score"], row["method"] != "drop", row["method"]))
    header = ("bytes", "bits", "kept by", "", "prompts", "KL", "less KL", "same token, %", "right, %")
    return f"{_KINDS[kind]}:\n\n" + table(header, [_row(row) for row in own], numbers_from=4)


def _row(row: dict[str, Any]) -> list[str]:
    error = row["kl_over_drop_error"]
    less = f"{-row['kl_over_drop']:+.3f}" + ("" if error is None else f" ± {error:.3f}")
    return [
        f"{100 * row['share']:g} %",
        f"{row['bits'] or 16}",
        row["score"],
        _NAMES[row["method"]],
        f"{row['prompts']}",
        f"{row['kl']:.3f}",
        "" if row["method"] == "drop" else less,
        f"{100 * row['same']:.0f}",
        f"{100 * row['right']:.0f}",
    ]
