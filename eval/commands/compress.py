"""`paged-eviction compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors
from .options import AllowPickle, DeviceMap, Dtype, Heads, TrustRemoteCode

EPILOG = """[bold]Examples[/]

  paged-eviction compress --text book.txt --budget 256 --policy keydiff --output book.safetensors

  paged-eviction compress --model Qwen/Qwen3-8B --text book.txt --memory 512MiB --output book.safetensors

Then, in Python, as often as you like

  cache = PagedEvictionCache.load("book.safetensors", model.config, device=model.device)
  model.generate(**cache.follow_up(question_ids), past_key_values=cache)
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compress", epilog=EPILOG)(compress)


def compress(
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="What the model reads: a plain text.")],
    output: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The file to write.")],
    budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens held per layer, a multiple of the block size; or --memory.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of keys and values in all paged layers: 512MiB, 2GB.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="One of `paged-eviction policies`, with parameters, modifiers and an allocator: snapkv(window=16), "
            "caote(h2o), h2o@pyramid. One that needs no question serves any question.",
        ),
    ] = "keydiff",
    heads: Annotated[
        Heads, typer.Option(help="One decision for all KV heads of a layer, or one for each.")
    ] = Heads.shared,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    sink_tokens: Annotated[
        int | None, typer.Option(min=0, help="First tokens that are never evicted.", show_default="one block")
    ] = None,
    prefill_chunk_size: Annotated[
        int, typer.Option(min=1, help="Most tokens per forward while the text is read: bounds the memory.")
    ] = 512,
    model: Annotated[
        str, typer.Option(help="A folder or a name on the Hugging Face Hub; embedded is the small one of the package.")
    ] = "embedded",
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
    """Read a text once, compress it, and save the cache: to answer from it many times, on any day and machine."""
    with plain_errors():
        from ..contexts import ContextSettings, loading_settings, run_compress
        from ..environment import best_device
        from ..errors import UserError
        from ..requests import check_device
        from ..settings import EMBEDDED

        if (budget is None) == (memory is None):
            raise UserError("how much may be held? --budget TOKENS or --memory SIZE, one of them")
        loading = loading_settings(
            policy,
            heads.value,
            block_size,
            model=model,
            tokenizer=tokenizer,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            dtype=dtype.value,
            device=check_device(device or ("cpu" if model == EMBEDDED else best_device())),
            device_map=None if device_map is None else device_map.value,
        )
        run_compress(
            ContextSettings(
                loading=loading,
                text=text,
                output=output,
                budget=budget,
                memory=memory,
                sink_tokens=sink_tokens,
                chunk=prefill_chunk_size,
            )
        )
