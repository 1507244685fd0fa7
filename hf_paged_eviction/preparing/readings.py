"""What was measured so far, in a file, so that a measurement that was stopped goes on where it was."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

#: By aspect, the divergences of one passage; None = the model does not support this cache at this size.
Divergences = Mapping[str, Sequence[float]] | None


@dataclass(frozen=True)
class Reading:
    """One cache at one size on one passage.

    Attributes:
        cache: its label.
        share: share of the memory.
        passage: index of the passage.
    """

    cache: str
    share: float
    passage: int


class Readings:
    """The measured divergences by `Reading`. Each is written to the file as soon as it is measured.

    Attributes:
        goes_on: whether the file had readings of the same measurement.

    Args:
        path: the file: a line of JSON that says what is measured, then a line for each reading. A file of
            another measurement is overwritten.
        subject: what is measured.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self._path = path
        header = json.dumps(subject, sort_keys=True)
        lines = _whole_lines(path)
        self.goes_on = lines[:1] == [header]
        self._done: dict[Reading, Divergences] = {}
        for line in lines[1:] if self.goes_on else ():
            key, divergences = json.loads(line)
            self._done[Reading(*key)] = divergences
        path.write_text("\n".join([header, *(lines[1:] if self.goes_on else ()), ""]), "utf-8")

    def get(self, reading: Reading, measure: Callable[[], Divergences]) -> Divergences:
        """The divergences of a reading; `measure` returns them if they are not known."""
        if reading not in self._done:
            divergences = self._done[reading] = measure()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([astuple(reading), divergences]) + "\n")
        return self._done[reading]

    def known(self, reading: Reading) -> Mapping[str, Sequence[float]]:
        """The divergences of a reading so far; none if it was not measured or cannot be."""
        return self._done.get(reading) or {}


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file without the last one if the process was killed while it wrote that."""
    return path.read_text("utf-8").split("\n")[:-1] if path.is_file() else []
