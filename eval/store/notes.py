"""What has to be said of rows beside their scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..grouping import grouped
from ..metrics.thinking import UNENDED
from .results import Row


def notes_of(rows: Iterable[Row]) -> Iterator[str]:
    """Sentences on prompts that were cut, on answers longer than their task says, and on thinking without an end."""
    by_task = grouped(rows, lambda row: row.get("task"))
    cut = {task: {row["id"] for row in mine if row.get("truncated")} for task, mine in by_task.items()}
    if any(cut.values()):
        counts = [(task, len(ids), len({row["id"] for row in by_task[task]})) for task, ids in cut.items() if ids]
        shown = ", ".join(f"{task} {count} of {every}" for task, count, every in counts)
        yield f"prompts that were too long and lost their middle: {shown} (--max-length)"
    left = grouped(
        (row for rows in by_task.values() for row in rows if row.get("protocol_tokens")),
        lambda row: (row["task"], row["protocol_tokens"], row["max_new_tokens"]),
    )
    if left:
        shown = ", ".join(f"{task} {most} in place of {own}" for task, own, most in left)
        yield (
            f"most tokens of an answer (--max-new-tokens): {shown}; the protocol is left, and scores are not "
            "comparable with published ones"
        )
    for task, answers in by_task.items():
        thought = [row["thinking"] for row in answers if row.get("thinking")]
        open_ended = thought.count(UNENDED)
        if thought:
            end = f"{open_ended} of them never came to the end and count as empty (--max-new-tokens)"
            yield (
                f"{task}: {len(thought)} of {len(answers)} answers begin with thinking, which is not scored; "
                + (end if open_ended else "all came to its end")
            )
