"""Play drawn cases for as long as one likes: `make fuzz SECONDS=600 SEED=0`.

Ends with the smallest case, as a script, at the first failure (`--go-on`: after all the time, one for each kind).
"""

import argparse
import sys
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from drawing import draw
from playing import Case, RefusedError, play
from smallest import failure_of, message_of, script, smallest


class Count:
    """What was drawn, and what came of it."""

    def __init__(self) -> None:
        self.played = self.refused = self.forwards = self.evicted = 0
        self.values: Counter[str] = Counter()
        self.pairs: set[tuple[str, str]] = set()

    def note(self, case: Case, forwards: int, evicted: int) -> None:
        """A case was played to its end."""
        self.played += 1
        self.forwards += forwards
        self.evicted += evicted > 0
        names = sorted(drawn(case))
        self.values.update(names)
        self.pairs.update(combinations(names, 2))

    def __str__(self) -> str:
        return (
            f"{self.played} played ({self.evicted} evicting), {self.refused} refused, {self.forwards} forwards, "
            f"{len(self.pairs)} pairs of values"
        )


def drawn(case: Case) -> set[str]:
    """The values of a case that are not the default, and the kinds of its calls."""
    options = {f"{name}={value}" for name, value in case.options.items() if name != "budget"}
    labels = {f"as {type(value).__name__} budget" for name, value in case.options.items() if name == "budget"}
    calls = {call[0] if len(call) < 2 or isinstance(call[1], int) else f"{call[0]} {call[1]}" for call in case.calls}
    if case.autocast:
        labels.add("autocast")
    return options | labels | calls | {case.family, case.attention, f"{case.rows} rows"}


def one(seed: int, count: Count) -> Case | None:
    """Play the case of this seed; returns it if it fails."""
    case = draw(seed)
    try:
        game = play(case)
    except RefusedError:
        count.refused += 1
    except Exception:  # whatever it is, it should not be
        return case
    else:
        count.note(case, game.forwards, game.cache.stats().evicted_tokens)
    return None


def main() -> int:
    """Returns the number of kinds of failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--cases", type=int, default=None, help="how many at most")
    parser.add_argument("--go-on", action="store_true", help="after a failure, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count, failures = Count(), {}
    stop, shown, seed = time.monotonic() + arguments.seconds, time.monotonic(), arguments.seed
    while time.monotonic() < stop and (arguments.cases is None or seed < arguments.seed + arguments.cases):
        case = one(seed, count)
        seed += 1
        if time.monotonic() > shown + 10:
            shown = time.monotonic()
            print(f"seed {seed}: {count}, {len(failures)} kinds of failure", flush=True)
        kind = failure_of(case) if case is not None else None
        if case is not None and kind is not None and kind not in failures:
            failures[kind] = case
            print(f"\nseed {case.seed} fails: {kind}; made smaller:", flush=True)
            less = smallest(case)
            print(f"# seed {case.seed}, after {count}\n{script(less)}\n\n{message_of(less)}", flush=True)
            if not arguments.go_on:
                break
    print(f"seeds {arguments.seed} to {seed - 1}: {count}, {len(failures)} kinds of failure")
    print(", ".join(f"{name} {times}" for name, times in sorted(count.values.items())))
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
