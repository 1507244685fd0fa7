"""Names of runs as a person would say them: by the settings in which they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..grouping import grouped

#: What is said first.
_FIRST = ("model", "question_aware")
#: Values that say by themselves what they are.
_PLAIN = frozenset({"model", "dtype", "device"})


def labels(settings: Sequence[dict[str, Any]], passed_over: frozenset[str]) -> list[str]:
    """One label per run, equal where its settings are; no setting is in it that the others make superfluous.

    Runs over tasks and over texts are told apart by the settings that both have, and those of one kind by their own.

    Args:
        settings: of each run.
        passed_over: settings that tell no runs apart.
    """
    shared = _telling(settings, passed_over)
    words: list[dict[str, str]] = [{} for _ in settings]
    for places in grouped(range(len(settings)), lambda at: _kind(settings[at])).values():
        for name in (*shared, *_telling([settings[at] for at in places], passed_over, shared)):
            compared = range(len(settings)) if name in shared else places
            texts = dict(zip(compared, _words(name, [settings[at][name] for at in compared]), strict=True))
            for at in places:
                words[at][name] = texts[at]
    # What is at its default goes without saying, where another word tells the run.
    brief = [{name: word for name, word in line.items() if not word.startswith("default ")} for line in words]
    if all(brief) and len({tuple(line.items()) for line in brief}) == len({tuple(line.items()) for line in words}):
        words = brief
    joined = [", ".join(line[name] for name in sorted(line, key=_place)) for line in words]
    return [label or _kind(run) for label, run in zip(joined, settings, strict=True)] if any(joined) else joined


def _kind(settings: dict[str, Any]) -> str:
    return "texts" if "files" in settings and "tasks" not in settings else "tasks"


def _place(name: str) -> tuple[bool, str]:
    return name not in _FIRST, name


def _telling(settings: Sequence[dict[str, Any]], passed_over: frozenset[str], always: Sequence[str] = ()) -> list[str]:
    """Settings that tell runs apart which the known ones do not."""
    # A setting that an older version did not write down says nothing.
    common = set.intersection(*map(set, settings)) - passed_over - set(always)
    names = sorted((name for name in common if len({_text(run[name]) for run in settings}) > 1), key=_place)
    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if _distinct(settings, [*always, *fewer]) == _distinct(settings, [*always, *names]):
            names = fewer
    return names


def _distinct(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> int:
    return len({tuple(_text(run[name]) for name in names) for run in settings})


def _words(name: str, values: Sequence[Any]) -> list[str]:
    """What each value is called; values that would be called the same are written out."""
    texts = [_word(name, value) for value in values]
    if len(set(texts)) == len({_text(value) for value in values}):
        return texts
    return [f"{name.replace('_', ' ')} {value if isinstance(value, str) else _text(value)}" for value in values]


def _word(name: str, value: Any) -> str:
    spoken = name.replace("_", " ").replace("attn implementation", "attention")
    if name == "question_aware":
        return "question known" if value else "question unknown"
    if value is None:
        return f"default {spoken}"
    if isinstance(value, bool):
        return spoken if value else f"no {spoken}"
    text = value.rstrip("/").rpartition("/")[2] or value if isinstance(value, str) else _text(value)
    return text if name in _PLAIN else f"{spoken} {text}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
