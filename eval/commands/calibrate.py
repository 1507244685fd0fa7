"""`paged-eviction calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors
from .options import AllowPickle, DeviceMap, Dtype, TrustRemoteCode

EPILOG = """[bold]Examples[/]

  paged-eviction calibrate --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies paged_eviction,calibrated:qwen.safetensors --budgets 1024
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate", epilog=EPILOG)(calibrate)


def calibrate(
    output: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The file to write.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE...",
            help="What the model reads: plain texts, or JSON lines with a field context or text. Best like that which "
            "it will read later, questions and answers included.",
        ),
    ] = None,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE...]", help="More of them.")] = None,
    model: Annotated[
        str, typer.Option(help="A folder or a name on the Hugging Face Hub; embedded is the small one of the package.")
    ] = "embedded",
    tokens: Annotated[int, typer.Option(min=1, help="To read, in all; a few thousand are enough.")] = 65536,
    window: Annotated[int, typer.Option(min=1, help="Tokens per window: as long as the texts that matter.")] = 1024,
    tokenizer: Annotated[str | None, typer.Option(help="If it is not the model's own.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on a CPU, else the checkpoint's.")] = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help="The accelerator if there is one; the CPU for the embedded model.")
    ] = None,
    device_map: Annotated[DeviceMap | None, typer.Option(help="auto: layers split over all devices.")] = None,
) -> None:
    """Fit the policy calibrated:FILE to a model: what later tokens attend to, told from keys and values alone."""
    with plain_errors():
        from ..calibrate import run_calibrate, text_settings

        settings = text_settings(
            [*(text or ()), *(files or ())],
            window,
            model=model,
            tokenizer=tokenizer,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            dtype=dtype.value,
            device=device,
            device_map=None if device_map is None else device_map.value,
        )
        run_calibrate(settings, output, tokens)
