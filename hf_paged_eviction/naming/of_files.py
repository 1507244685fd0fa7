"""Things that a file makes, as text: `calibrated:F.safetensors`, `gate:'a, b (1).safetensors'(keep_above=0.01)`.

Alone, the rest of the text is the file, so a path needs no quotes there. Inside other things a path ends at the first
comma or parenthesis; one that has any stands in quotes, in which a doubled quote is one quote and nothing else is
special, backslashes included.
"""

import re
from collections.abc import Collection

_QUOTED = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
_PARAMETERS = re.compile(r"(\(\s*(?:\w+\s*=[^()]*)?\))\s*$")
#: What a path without quotes has none of.
_SPECIAL = re.compile(r"[,()'\"]|^\s|\s$")


def quoted(file: str) -> str:
    """A file as it stands behind the colon, in quotes where it needs some."""
    if file and not _SPECIAL.search(file):
        return file
    mark = '"' if "'" in file and '"' not in file else "'"
    return f"{mark}{file.replace(mark, 2 * mark)}{mark}"


def take_out(text: str, prefixes: Collection[str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """The text with a plain word in place of each `prefix:file`, as long as what it replaces, so that columns stay.

    Args:
        prefixes: the names that may stand before the colon.

    Returns:
        The text, and by word the prefix and the file.
    """
    files: dict[str, tuple[str, str]] = {}
    if not prefixes:
        return text, files
    named = "|".join(map(re.escape, sorted(prefixes)))
    alone = re.match(rf"({named}):(?!\s*['\"])(.*)$", text, re.DOTALL)
    if alone:
        parameters = _PARAMETERS.search(alone[2])
        file = alone[2][: parameters.start()] if parameters else alone[2]
        word = _word(0, len(alone[1]) + 1 + len(file))
        return word + (parameters[1] if parameters else ""), {word: (alone[1], file.strip())}

    def replace(match: re.Match[str]) -> str:
        if match["string"]:
            return match["string"]
        word = _word(match.start(), len(match[0]))
        files[word] = (match["prefix"], _unquoted(match["file"].strip()))
        return word

    pattern = rf"(?<![\w.:])(?P<prefix>{named}):\s*(?P<file>{_QUOTED}|[^,()'\"]*)|(?P<string>{_QUOTED})"
    return re.sub(pattern, replace, text), files


def _word(place: int, length: int) -> str:
    return f"_{place}".ljust(length, "_")


def _unquoted(file: str) -> str:
    mark = file[:1]
    return file[1:-1].replace(2 * mark, mark) if mark in ("'", '"') else file
