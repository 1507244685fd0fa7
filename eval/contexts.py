"""Contexts that are read once and answered from many times: what `paged-eviction compress` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction.saving import files
from hf_paged_eviction.stats import readable_bytes

from . import models
from .calibrate import token_bar
from .errors import UserError
from .policy_names import ORACLE, needs_queries, split_name
from .running.prefill import feed, input_device
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """What is read into which cache.

    Attributes:
        loading: which model, where. Its policy is the one that is used.
        text: a plain text.
        output: the file to write, `*.safetensors`.
        budget, memory: tokens per layer, or bytes of all of them; one of the two.
        chunk: tokens per forward.
    """

    loading: Settings
    text: Path
    output: Path
    budget: int | None = None
    memory: str | None = None
    sink_tokens: int | None = None
    chunk: int = 512

    @property
    def policy(self) -> str:
        """With its allocator, if it has one."""
        return self.loading.policies[0]


def loading_settings(policy: str, heads: Literal["shared", "separate"], block_size: int, **model: Any) -> Settings:
    """Which model to load for such a cache.

    Args:
        model: other fields of `Settings`.

    Raises:
        UserError: there is no such policy.
    """
    try:
        ours = needs_queries(policy)
    except (TypeError, ValueError) as error:
        raise UserError(f"--policy {policy}: {error}") from error
    if policy == ORACLE:
        raise UserError("--policy oracle: it knows the answers of a full cache, which a saved context has none of")
    return Settings(
        **model,
        policies=(policy,),
        budgets=(),
        block_size=block_size,
        heads=heads,
        attn_implementation=PAGED_EVICTION if ours else None,
    )


def run_compress(settings: ContextSettings) -> PagedEvictionCache:
    """Read a text into a cache, write it to a file, and say what it holds.

    Raises:
        UserError: the text or the output cannot be used, or model, policy and budget do not go together.
    """
    notes = Console(stderr=True)
    _check_output(settings.output)
    text = _read_text(settings.text)
    model, tokenizer = models.load(settings.loading)
    cache = _make_cache(model.config, settings)
    ids = text_ids(tokenizer, text).to(input_device(model))
    with token_bar(notes) as bar:
        task = bar.add_task("reading", total=ids.shape[1])
        for start in range(0, ids.shape[1], settings.chunk):
            part = ids[:, start : start + settings.chunk]
            try:
                feed(model, part, torch.ones_like(ids[:, : start + part.shape[1]]), cache)
            except ValueError as error:
                raise UserError(f"cannot read {settings.text} with {settings.policy}: {error}") from error
            bar.advance(task, part.shape[1])
    try:
        cache.save(settings.output, input_ids=ids)
    except (OSError, ValueError) as error:
        raise UserError(f"--output {settings.output}: {error}") from error
    stats = cache.stats()
    notes.print(
        f"{stats.seen} tokens read, {stats.held} held in a layer at most: {readable_bytes(stats.storage_bytes)}, and "
        f"{readable_bytes(stats.other_bytes)} in layers that evict nothing; "
        f"{readable_bytes(settings.output.stat().st_size)} "
        f"written to {settings.output}. In Python: PagedEvictionCache.load({str(settings.output)!r}, model.config)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return cache


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """A text as ids `[1, n]`, begun as the model wants it and left open: a question follows."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    if not ids:
        raise UserError("the text is empty")
    return torch.tensor([ids])


def open_context(path: Path, model: Any) -> PagedEvictionCache:
    """A saved context in the model's own device and attention, to go on from.

    `cache.follow_up(ids)` makes what `generate` is to be given of the tokens that come next.

    Raises:
        UserError: it cannot be read, or belongs to another model.
    """
    try:
        settings = files.read_content(path)["settings"]
        shares = settings["allocator"] != "uniform" or isinstance(settings["budget"], list)
        if (shares or needs_queries(settings["policy"])) and model.config._attn_implementation != PAGED_EVICTION:
            model.set_attn_implementation(PAGED_EVICTION)
        return PagedEvictionCache.load(path, model.config, device=input_device(model))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot use the context {path}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: {error}") from error


def _check_output(output: Path) -> None:
    """Refuse, before anything is computed, a file that could not be written."""
    if output.suffix != ".safetensors":
        raise UserError(f"--output {output}: the name of a context ends in .safetensors")
    if output.is_dir() or not output.parent.is_dir():
        raise UserError(f"--output {output}: {output if output.is_dir() else output.parent} is no place for a file")


def _make_cache(config: Any, settings: ContextSettings) -> PagedEvictionCache:
    name, allocator = split_name(settings.policy)
    try:
        cache = PagedEvictionCache(
            config,
            budget=settings.budget,
            memory=settings.memory,
            block_size=settings.loading.block_size,
            policy=name,
            heads=settings.loading.heads,
            sink_tokens=settings.sink_tokens,
            allocator=allocator,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{settings.policy}: {error}") from error
    if not cache.paged_layers:
        raise UserError("no layer of this model keeps all that it has read, so there is nothing to evict")
    return cache
