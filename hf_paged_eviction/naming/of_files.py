"""Names with a file: `calibrated:F.safetensors`, `low_rank:'a, b (1).safetensors'(rank=64)`.

If the name stands alone, the rest of the text is the file, and a path needs no quotes. Inside other names a path ends
at the first comma or parenthesis, so a path with one of these needs quotes. Inside quotes a doubled quote is one quote,
and nothing else is special, not even a backslash.
"""

import re
from collections.abc import Collection

_QUOTED = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
_PARAMETERS = re.compile(r"(\(\s*(?:\w+\s*=[^()]*)?\))\s*$")
#: Characters that need quotes.
_SPECIAL = re.compile(r"[,()'\"]|^\s|\s$")


def quoted(file: str) -> str:
    """Write a file for the place after the colon, in quotes if necessary."""
    if file and not _SPECIAL.search(file):
        return file
    mark = '"' if "'" in file and '"' not in file else "'"
    return f"{mark}{file.replace(mark, 2 * mark)}{mark}"


def take_out(text: str, prefixes: Collection[str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Replace each `prefix:file` in a text by a plain word of the same length, so that columns do not change.

    Args:
        prefixes: the names that take a file.

    Returns:
        The new text, and for each word its prefix and file.
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
