"""`paged-eviction verify`."""

from __future__ import annotations

from ..options.base import File, option
from ..options.model import ModelOptions


class VerifyOptions(ModelOptions):
    """What was typed."""

    budget: int = option(20, "Tokens of the small budget, a multiple of 4.", at_least=16)
    thorough: bool = option(False, "Check every value of every setting, not only what finds most errors.")
    output: File | None = option(None, "Also write all checks, as JSON.", metavar="FILE.json")


def verify(options: VerifyOptions) -> bool:
    """Check that the cache is right for a model: compare logits with DynamicCache, in seconds.

    The table has a line for each check. "same as DynamicCache": a budget that holds everything gives its logits. "exact
    for what it holds": a small budget gives the logits of a full cache whose evicted positions are masked. "row as
    alone": a row of a padded batch gives the logits of that row without the others and its pads. WRONG: it does not,
    by what the column error says. A folder without weights gets random ones. Exit status 1 if a check is wrong.

    Examples:
      paged-eviction verify --model Qwen/Qwen3-8B
      paged-eviction verify --model ./my-model --dtype bfloat16 --thorough --output verified.json
    """
    from ..models.device import model_settings
    from ..models.verifying import run_verify

    return run_verify(model_settings(options), options.output, budget=options.budget, thorough=options.thorough).ok
