"""The reference of the command line: what each command says of itself."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from unittest.mock import patch

from hf_paged_eviction_eval.commands import COMMANDS, GROUP
from hf_paged_eviction_eval.commands.parser import parser_of


def sections(_: str) -> str:
    """A section for each command of this package: its `--help`."""
    others = {point.name for point in entry_points(group=GROUP) if point.dist.name != "hf_paged_eviction"}
    with patch.dict(os.environ, COLUMNS="120"):
        helps = {name: parser_of(name, run).format_help() for name, run in COMMANDS.items() if name not in others}
    return "\n\n".join(f"## `paged-eviction {name}`\n\n```text\n{text.strip()}\n```" for name, text in helps.items())
