"""What has to be said of rows beside their scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..data.longbench.tasks import TASKS
from ..grouping import grouped
from ..metrics.thinking import UNENDED
from .results import Row


def _is_inside(row: Row) -> bool:
    """Whether the right answer stands among other words, which `qa_f1` counts against it."""
    said, right = str(row.get("prediction")).lower(), row.get("answers") or ()
    return row.get("metric") == "qa_f1" and row["score"] < 0.5 and any(answer.lower() in said for answer in right)


def notes_of(rows: Iterable[Row]) -> Iterator[str]:
    """Sentences on prompts that were cut, on answers that are longer than their task says or than the right one, and on
    thinking without an end."""
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
        inside = sum(map(_is_inside, answers)) if task not in TASKS else 0
        if inside:
            yield (
                f"{task}: {inside} of {len(answers)} answers hold the right one among other words, and qa_f1 counts "
                "every word; whether they hold it is scored by `paged-eviction score FOLDER --metric contains`"
            )
        thought = [row["thinking"] for row in answers if row.get("thinking")]
        open_ended = thought.count(UNENDED)
        if thought:
            end = f"{open_ended} of them never came to the end and count as empty (--max-new-tokens)"
            yield (
                f"{task}: {len(thought)} of {len(answers)} answers begin with thinking, which is not scored; "
                + (end if open_ended else "all came to its end")
            )
