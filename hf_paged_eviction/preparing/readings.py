"""What was measured so far, in a file, so that a measurement that was stopped goes on where it was."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ..naming.files import named_error, set_aside, whole_file

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
        path: the file: a line of JSON that says what is measured, then a line for each reading, each behind its
            checksum. A file with damaged lines is set aside, and its other lines count; one of another measurement is
            overwritten.
        subject: what is measured.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self._path = path
        header = json.dumps(subject, sort_keys=True)
        lines = _whole_lines(path)
        self._done: dict[Reading, Divergences] = {}
        content = [_content(line) for line in lines]
        if None in content:
            set_aside(path, "some of its lines are damaged, and what they hold is measured anew")
        self.goes_on = content[:1] == [header]
        known = [text for text in content[1:] if text is not None] if self.goes_on else []
        for text in known:
            key, divergences = json.loads(text)
            self._done[Reading(*key)] = divergences
        with whole_file(path) as temporary:
            temporary.write_text("".join(map(_line, [header, *known])), "utf-8")

    def get(self, reading: Reading, measure: Callable[[], Divergences]) -> Divergences:
        """The divergences of a reading; `measure` returns them if they are not known.

        Raises:
            OSError: the file cannot be written.
        """
        if reading not in self._done:
            divergences = self._done[reading] = measure()
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_line(json.dumps([astuple(reading), divergences])))
            except OSError as error:
                raise named_error(error, self._path) from error
        return self._done[reading]

    def known(self, reading: Reading) -> Mapping[str, Sequence[float]]:
        """The divergences of a reading so far; none if it was not measured or cannot be."""
        return self._done.get(reading) or {}


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file without the last one if the process was killed while it wrote that."""
    return path.read_text("utf-8", "replace").split("\n")[:-1] if path.is_file() else []


def _line(text: str) -> str:
    """A line of the file: JSON behind its checksum."""
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _content(line: str) -> str | None:
    """The JSON of a line; None = it is damaged."""
    checksum, _, text = line.partition(" ")
    return text if checksum == f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}" else None
