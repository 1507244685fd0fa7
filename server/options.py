"""The options of `paged-eviction serve`."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from hf_paged_eviction.table.spans import read_protect
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.base import Numbers, option, readable
from hf_paged_eviction_eval.options.cache import OneCacheOptions
from hf_paged_eviction_eval.options.model import ModelOptions

_POOL = "Pages"
_KEY = "PAGED_EVICTION_API_KEY"
#: Whose messages may be protected; those of a "developer" are the "system"'s; "tools": what it is told of them.
Role = Literal["system", "user", "assistant", "last_user", "tools"]


def _read_roles(typed: str) -> None:
    if not all(word in get_args(Role) for word in read_protect(typed)):
        raise ValueError(
            f"write {', '.join(get_args(Role))}. Spans of tokens belong to one text: a request to /v1/completions may "
            'bring some, "protect": [[0, 64]]'
        )


def _read_tokens(typed: Any) -> Any:
    if not (isinstance(typed, int) or (typed.isascii() and typed.isdecimal())) or int(typed) < 1:
        raise ValueError(
            "write a number of tokens, such as 2048: pages are reserved before a prompt is read. `paged-eviction plan` "
            "says how many tokens a number of bytes holds"
        )
    return typed


def _read_origin(typed: str) -> None:
    parts = urlsplit(typed)
    if typed != "*" and (parts.scheme not in ("http", "https") or typed != f"{parts.scheme}://{parts.netloc}"):
        raise ValueError("write a scheme and a host, without a path, such as https://example.org, or *")


class ServeOptions(ModelOptions, OneCacheOptions):  # type: ignore[misc]
    """The parsed options."""

    panel: ClassVar[str] = "The server"
    #: Pages of continuous batching hold tokens at their places in the text. KV heads evict as the policy was published.
    #: One server is for one device.
    left_out: ClassVar[frozenset[str]] = frozenset({"heads", "disposal", "positions", "device_map"})

    model: str = option(
        ...,
        "A folder, a GGUF file or a name on the Hugging Face Hub; embedded is the small one of the package.",
        metavar="NAME",
        panel=ModelOptions.panel,
    )
    budget: Annotated[int, BeforeValidator(_read_tokens)] = option(
        ...,
        "Tokens held per request and layer, a multiple of the block size.",
        metavar="N",
        panel=OneCacheOptions.panel,
    )
    policy: str = option(
        "auto",
        "Eviction policy. auto: the best one for the model by `paged-eviction prepare`, with its budgets of heads; "
        "without a profile, one that needs none.",
        metavar="NAME",
        panel=OneCacheOptions.panel,
    )
    prefill_chunk_size: int = option(512, "Tokens of the prompt per forward.", at_least=1, panel=OneCacheOptions.panel)
    protect: Annotated[Numbers, readable(_read_roles)] | None = option(
        None,
        "Messages of every conversation that are never evicted: system, tools, last_user, user, assistant. The field "
        "protect of a request overrides it.",
        metavar="ROLE,...",
        shown="none",
        panel=OneCacheOptions.panel,
    )
    context: list[str] | None = option(
        None,
        "Saved context: a file that `paged-eviction compress` wrote with the same budget, policy and sinks. A request"
        ' with "context": "NAME" continues from it. May be given several times.',
        metavar="NAME=FILE",
        panel=OneCacheOptions.panel,
    )
    host: str = option("localhost", "Host name or address to listen on. Other machines cannot reach localhost.")
    port: int = option(8000, "Port to listen on; 0: any free one.", at_least=0, at_most=65535)
    served_name: str | None = option(
        None, "Name of the model in requests.", metavar="NAME", shown="--model, of a folder its last part"
    )
    max_prompt_tokens: int | None = option(
        None, "Longest prompt; a longer one is refused.", at_least=1, shown="the model's window"
    )
    max_new_tokens: int = option(4096, "Most tokens of an answer that a request may ask for.", at_least=1)
    max_queue: int = option(
        256, "Most answers that are running or waiting; further requests get status 429.", at_least=1
    )
    grace: float = option(
        10.0, "Seconds to finish answers after SIGTERM; a second SIGTERM ends the server at once.", at_least=0
    )
    api_key: str | None = option(
        None,
        "Requests need Authorization: Bearer KEY; only /health works without. The environment variable "
        f"{_KEY} sets it, too, and is not visible to other users of the machine.",
        metavar="KEY",
        shown="none",
    )
    allow_origin: list[Annotated[str, readable(_read_origin)]] | None = option(
        None,
        "Allow requests from web pages of this origin (CORS), such as https://example.org; * allows all. May be given "
        "several times.",
        metavar="ORIGIN",
        shown="none",
    )
    quiet: bool = option(False, "No line per request in the log.")
    pages: int | None = option(
        None,
        "Pages of the cache, for all requests together.",
        at_least=1,
        panel=_POOL,
        shown="for 16 requests on a CPU, else what memory allows",
    )
    page_size: int | None = option(
        None,
        "Tokens per page, of keys and values in the model's type.",
        at_least=4,
        panel=_POOL,
        shown="the budget, at most 256; in few bits as many bytes",
    )
    batch_tokens: int | None = option(
        None, "Most tokens of a forward.", at_least=1, panel=_POOL, shown="a chunk and 16 answers on a CPU, else 8192"
    )

    @property
    def key(self) -> str | None:
        """The key that requests need; None = none.

        Raises:
            UserError: it was given, and nobody could send it.
        """
        name, key = ("--api-key", self.api_key) if self.api_key is not None else (_KEY, os.environ.get(_KEY))
        if key is None or (key and key.isascii() and key.isprintable() and " " not in key):
            return key
        if key.strip():
            raise UserError(
                f"{name}: a key has printable ASCII characters and no blanks, so that a header can carry it"
            )
        raise UserError(f"{name} is empty, perhaps from a variable that is not set: give a key, or leave it out")

    @property
    def contexts(self) -> dict[str, str]:
        """The files of saved contexts by name.

        Raises:
            UserError: an option is not of the form NAME=FILE.
        """
        pairs = [entry.partition("=") for entry in self.context or ()]
        for name, _, path in pairs:
            if not (name and path):
                raise UserError(f"--context {name or path!r}: write NAME=FILE")
        return {name: path for name, _, path in pairs}

    @property
    def batching_arguments(self) -> dict[str, Any]:
        """The arguments of `paged_batching`."""
        cache = {*OneCacheOptions.model_fields, "prefill_chunk_size"} - {*self.left_out, "protect"}
        return {name: getattr(self, name) for name in cache}
