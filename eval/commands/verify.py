"""`paged-eviction verify`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from ..options.base import File, option
from ..options.model import EMBEDDED, ModelOptions

EPILOG = """[bold]What the table says[/]

same as DynamicCache: a budget that holds everything gives the logits of DynamicCache

exact for what it holds: a small budget gives the logits of a full cache whose evicted positions are masked

row as alone: a row of a padded batch gives the logits of the same row without the others and without its pads

WRONG: it does not; the column error says by how much. refused: the package refuses this model, with the reason. not \
covered: there is nothing to compare with, with the reason.

[bold]Examples[/]

  paged-eviction verify --model Qwen/Qwen3-8B

  paged-eviction verify --model ./my-model --dtype bfloat16 --thorough --json verified.json
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder or a name on the Hub; without weights it gets random ones",
    "budget": "tokens of the small budget (20)",
    "thorough": "every value of every setting",
    "json_file": "also write all checks",
    "device": "cpu, cuda, cuda:1, ...",
    "dtype": "auto, float32, bfloat16 or float16",
}


def _read_tokens(typed: Any) -> Any:
    if not (isinstance(typed, int) or (typed.isascii() and typed.isdecimal())) or int(typed) < 16:
        raise ValueError("write a number of tokens, 16 or more: texts are made as long as it takes to exceed it")
    return typed


class VerifyOptions(ModelOptions):
    """What was typed."""

    model: str = option(
        EMBEDDED,
        "A folder or a name on the Hugging Face Hub; embedded is the small one of the package. A folder with a "
        "configuration and no weights gets random ones.",
    )
    attn_implementation: str | None = option(
        None,
        "sdpa, eager, ... If not given: the model's default. paged_eviction is checked in any case.",
        metavar="NAME",
    )
    budget: Annotated[int, BeforeValidator(_read_tokens)] = option(
        20, "Tokens of the small budget, a multiple of 4.", at_least=16
    )
    seed: int = option(0, "Seed of the random tokens.")
    thorough: bool = option(
        False,
        "Check every value of every setting under each question, instead of the few checks that find most errors.",
        flags="--thorough/--quick",
    )
    json_file: File | None = option(None, "Also write all checks, as JSON.", metavar="FILE", flags="--json")


def verify(options: VerifyOptions) -> bool:
    """Check that the cache is right for a model: compare logits with DynamicCache, in seconds.

    Exit status 1 if a check is wrong.

    Runs the few checks that find most errors; with --thorough all checks.
    """
    from ..models.device import model_settings
    from ..models.verifying import run_verify

    checks = {name: getattr(options, name) for name in ("budget", "seed", "thorough")}
    return run_verify(model_settings(options), options.json_file, **checks).ok
