"""Names of runs as a person would say them: by the settings in which they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

#: What is said first.
_FIRST = ("model", "question_aware")
#: Values that say by themselves what they are.
_PLAIN = frozenset({"model", "dtype", "device"})


def labels(settings: Sequence[dict[str, Any]], passed_over: frozenset[str]) -> list[str]:
    """One label per run, equal where its settings are; no setting is in it that the others make superfluous.

    Args:
        settings: of each run.
        passed_over: settings that tell no runs apart.
    """
    # A setting that an older version did not write down says nothing.
    common = set.intersection(*map(set, settings)) - passed_over
    differing = [name for name in sorted(common) if len({_text(each[name]) for each in settings}) > 1]
    names = sorted(differing, key=lambda name: (name not in _FIRST, name))
    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if _distinct(settings, fewer) == _distinct(settings, names):
            names = fewer
    words = {name: _words(name, [each[name] for each in settings]) for name in names}
    return [", ".join(words[name][at] for name in names) for at in range(len(settings))]


def _distinct(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> int:
    return len({tuple(_text(each[name]) for name in names) for each in settings})


def _words(name: str, values: Sequence[Any]) -> list[str]:
    """What each value is called; values that would be called the same are written out."""
    found = [_word(name, value) for value in values]
    if len(set(found)) == len({_text(value) for value in values}):
        return found
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
