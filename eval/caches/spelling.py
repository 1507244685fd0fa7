"""Names of policies as they are typed, before torch is imported, which takes many seconds."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from importlib.metadata import entry_points

from hf_paged_eviction.naming.policies import POLICY_MODULES

from ..errors import UserError
from .plugins import VARIABLE

_NAME = re.compile(r"[A-Za-z_]\w*")
#: What stands in a list besides names of policies.
_OTHERS = ("auto", "full", "all")


def split_list(typed: str) -> list[str]:
    """The parts of a comma-separated list; a comma in parentheses, brackets or quotes belongs to its part."""
    parts, depth, quote = [""], 0, ""
    for piece in re.split(r"([()\[\],'\"])", typed):
        if piece in ("'", '"') and quote in ("", piece):
            quote = "" if quote else piece
        elif not quote:
            if piece == "," and depth <= 0:
                parts.append("")
                continue
            depth += (piece in ("(", "[")) - (piece in (")", "]"))
        parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def check_spelling(typed: str) -> None:
    """Refuse a name that is nearly one of a policy of this package. Whether a policy can be made is known later.

    Nothing is refused where others have brought policies.

    Raises:
        UserError: the message names the one that was meant.
    """
    if os.environ.get(VARIABLE) or entry_points(group="hf_paged_eviction.policies"):
        return
    known = [*POLICY_MODULES, *_OTHERS]
    for part in split_list(typed):
        name = _NAME.match(part)
        if name is None or name[0] in known:
            continue
        if close := get_close_matches(name[0], known, n=1):
            raise UserError(
                f"unknown policy {name[0]}, did you mean {close[0]!r}? choose from {', '.join(known)}; "
                "`paged-eviction policies` says what they are"
            )
