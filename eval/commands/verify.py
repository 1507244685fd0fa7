"""`paged-eviction verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors
from .options import AllowPickle, DeviceMap, DeviceName, Dtype, Precision, Revision, TrustRemoteCode

EPILOG = """[bold]What the table says[/]

same as DynamicCache: a budget that holds everything gives the logits of DynamicCache

exact for what it holds: a small budget gives the logits of a full cache whose evicted positions are masked

row as alone: a row of a padded batch gives the logits of the same row without the others and without its pads

WRONG: it does not, and error says by how much; refused: the package does not run this model so, and says why; not \
covered: there is nothing to compare with, and why

[bold]Examples[/]

  paged-eviction verify --model Qwen/Qwen3-8B

  paged-eviction verify --model ./my-model --dtype bfloat16 --json verified.json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", epilog=EPILOG)(verify)


def verify(
    model: Annotated[
        str,
        typer.Option(
            help="A folder or a name on the Hugging Face Hub; embedded is the small one of the package. A folder with "
            "a configuration and no weights gets random ones."
        ),
    ] = "embedded",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    dtype: Precision = Dtype.auto,
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="sdpa, eager, ... If not given: the model's default. paged_eviction is looked at in any case.",
        ),
    ] = None,
    device: DeviceName = None,
    device_map: Annotated[DeviceMap | None, typer.Option(help="auto: layers split over all devices.")] = None,
    budget: Annotated[int, typer.Option(min=16, help="Tokens of the small budget, a multiple of 4.")] = 20,
    policy: Annotated[
        str | None,
        typer.Option(help="What evicts.", show_default="random, and h2o where queries are shown"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens, which are random.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all checks, as JSON.")] = None,
) -> None:
    """Is the cache right for this model? Logits against DynamicCache, in seconds; exit status 1 if one is wrong."""
    with plain_errors():
        from ..verifying import run_verify, verify_settings

        settings = verify_settings(
            model=model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            dtype=dtype.value,
            attn_implementation=attn_implementation,
            device=device,
            device_map=None if device_map is None else device_map.value,
        )
        report = run_verify(settings, json, budget=budget, policy=policy, seed=seed)
    if not report.ok:
        raise typer.Exit(1)
