"""The commands of `paged-eviction`; needs the extra `eval`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from inspect import getdoc
from textwrap import fill

import hf_paged_eviction

from ..caches.plugins import load_plugins
from ..errors import UserError
from ..options.base import nearest
from . import bench, catalogue, compress, evaluate, plan, prepare, report, score, verify
from .parser import Command, Parser, plain_errors, run_command

#: Entry points of other packages, such as the lab.
GROUP = "hf_paged_eviction_eval.commands"
#: In the order of `--help`.
COMMANDS: dict[str, Command] = {
    "plan": plan.plan,
    "prepare": prepare.prepare,
    "eval": evaluate.evaluate,
    "score": score.score,
    "report": report.report,
    "verify": verify.verify,
    "compress": compress.compress,
    "bench": bench.bench,
    **{point.name: point.load() for point in entry_points(group=GROUP)},
    "tasks": catalogue.tasks,
    "policies": catalogue.policies,
}
_HELP = """usage: paged-eviction [--plugin MODULE] COMMAND [options]

Measure what a smaller KV cache costs: accuracy, perplexity, time and memory.

{commands}

  COMMAND --help    what it does, examples, and its options
  --plugin MODULE   a module or .py file that registers policies, allocators or
                    disposals of your own; once for each module
  --version         print the version
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command that was typed."""
    root = Parser(prog="paged-eviction", allow_abbrev=False, add_help=False)
    root.add_argument("--version", action="version", version=hf_paged_eviction.__version__)
    root.add_argument("--plugin", action="append", default=[])
    with plain_errors():
        options, rest = root.parse_known_args(words)
        load_plugins(options.plugin)
        if not rest or rest[0] in ("-h", "--help"):
            about = ((name, (getdoc(run) or "").partition(".")[0]) for name, run in COMMANDS.items())
            lines = (fill(f"  {name:<11}{what}", 80, subsequent_indent=" " * 13) for name, what in about)
            print(_HELP.format(commands="\n".join(lines)))
        elif rest[0] not in COMMANDS:
            raise UserError(f"unknown command {rest[0]}: {nearest(rest[0], COMMANDS)}")
        elif run_command(rest[0], COMMANDS[rest[0]], rest[1:]) is False:
            sys.exit(1)


__all__ = ["COMMANDS", "GROUP", "main"]
