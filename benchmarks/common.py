"""What the benchmarks share: interleaved timing, results with hardware and versions."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.bench import timing
from hf_paged_eviction_eval.models.environment import timed_on

RESULTS = Path(__file__).parent / "results"


def interleaved(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time every run once per round, so that the noise of a busy machine hits all of them alike. Seconds."""
    for run in runs.values():
        run()
    return timing.interleaved({name: partial(_seconds, run) for name, run in runs.items()}, rounds)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """Median over rounds of one run's time divided by another's of the same round."""
    return timing.ratio(times[of], times[to])


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
