"""What the benchmarks share: results with hardware and versions, tables in pages."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.models.environment import timed_on

RESULTS = Path(__file__).parent / "results"


def save(name: str, results: dict[str, Any]) -> None:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": timed_on(), **results}, indent=2) + "\n")
    print(f"written: {path}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; numbers from the second column on."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_section(text: str, name: str, content: str) -> str:
    """Put `content` between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    Raises:
        ValueError: the text has no such markers.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, marker, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (marker and closed):
        raise ValueError(f"no markers {begin} and {end}")
    return f"{head}{begin}\n{content}\n{end}{tail}"
