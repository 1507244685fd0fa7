"""The smallest case that still fails in the same way, and the script that plays it."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from playing import Call, Case, RefusedError, play

#: How a case failed: the kind of error, and what it said up to the first number.
Failure = tuple[str, str]


def failure_of(case: Case) -> Failure | None:
    """How it fails; None if it does not, or is refused."""
    try:
        play(case)
    except RefusedError:
        return None
    except Exception as error:  # whatever it is, it should not be
        words = "".join(letter if not letter.isdigit() else "#" for letter in str(error))
        return type(error).__name__, words.split("#")[0][:60]
    return None


def message_of(case: Case) -> str:
    """The error in full."""
    try:
        play(case)
    except Exception:
        return traceback.format_exc(limit=-3)
    return "It did not fail this time."


def smallest(case: Case, fails: Callable[[Case], Any] | None = None, tries: int = 400) -> Case:
    """Leave out and make smaller what can be, as long as the case fails in the same way.

    Args:
        fails: how a case fails; what it returns is compared with what it returns for the first one.
        tries: games to be played at most.
    """
    fails = fails or failure_of
    same = fails(case)
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(case):
            tries -= 1
            if tries < 0:
                return case
            if fails(smaller) == same:
                case, shrunk = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    calls = case.calls
    size = max(len(calls) // 2, 1)
    while size:
        for start in range(0, len(calls) - size + 1, size):
            yield replace(case, calls=calls[:start] + calls[start + size :])
        size //= 2
    for name in case.options:
        if name not in ("budget", "block_size"):
            yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    if case.family != "llama":
        yield replace(case, family="llama")
    if case.rows > 1:
        yield replace(case, rows=case.rows - 1)
    for name in ("pass_mask", "autocast", "attention"):
        plain = next(field.default for field in fields(Case) if field.name == name)
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    for at, call in enumerate(calls):
        for simpler in _simpler(call):
            yield replace(case, calls=(*calls[:at], simpler, *calls[at + 1 :]))


def _simpler(call: Call) -> Iterator[Call]:
    name, *arguments = call
    if arguments and arguments[-1] in ("left", "any"):
        yield (name, *arguments[:-1], "none")
    if arguments and isinstance(arguments[0], int) and arguments[0] > 1:
        for number in sorted({1, arguments[0] // 2, arguments[0] - 1} - {0, arguments[0]}):
            yield (name, number, *arguments[1:])


def script(case: Case) -> str:
    """A file that plays the case; run it in the root of the repository."""
    arguments = [f"    {name}={getattr(case, name)!r}," for name in (field.name for field in fields(Case))]
    return "\n".join(
        [
            "import sys",
            "",
            'sys.path[:0] = ["tests/fuzz", "tests/support"]',
            "from playing import Case, play",
            "",
            "play(Case(",
            *arguments,
            "))",
        ]
    )
