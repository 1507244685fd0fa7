"""Which model, and where it runs."""

from __future__ import annotations

from typing import ClassVar, Literal

from .base import Options, option

EMBEDDED = "embedded"


class Loading(Options):
    """What every command that loads a model is told."""

    title: ClassVar[str] = "model"

    model: str = option(
        EMBEDDED, "A folder or a name on the Hugging Face Hub; embedded is the small model of this package."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: float32 on a CPU, else the checkpoint's; bfloat16 of random weights."
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ...", shown="the best there is; cpu for the embedded model")
    trust_remote_code: bool = option(
        False, "Run the Python files that a model or tokenizer brings. They run with all your rights: read them first."
    )
    allow_pickle: bool = option(
        False, "Also read weights that are not safetensors (.bin), with torch.load and weights_only."
    )


class ModelOptions(Loading):
    """The same for a model with a tokenizer, perhaps on several devices."""

    title: ClassVar[str] = "model"

    tokenizer: str | None = option(None, "Tokenizer, if it is not the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    attn_implementation: str | None = option(
        None,
        "sdpa, eager, flash_attention_2, ...",
        metavar="NAME",
        shown="paged_eviction (sdpa that shows queries) if a policy needs it, else the model's",
    )
    device_map: Literal["auto"] | None = option(None, "auto: layers split over all devices, one process.")
