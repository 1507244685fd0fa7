"""Contexts that are read once and answered from many times: what `paged-eviction compress` does."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import AUTO, PAGED_EVICTION, feed, why_not_ours
from hf_paged_eviction.naming.sizes import readable_bytes
from hf_paged_eviction.options.cache_options import budget_of_text

from ..console import say, token_bar
from ..errors import UserError
from ..models import loading as models
from ..models.device import input_device, model_settings
from ..options.files import check_output, read_text
from ..options.settings import Settings
from .making import make_paged_cache
from .policy_names import attention_for, one_policy


def run_compress(options: Any) -> PagedEvictionCache:
    """Read a text into a cache, write it to a file, and say what it holds.

    Args:
        options: of the command.

    Raises:
        UserError: the text or the output cannot be used, or model, policy and budget do not go together.
    """
    notes = Console(stderr=True)
    if options.budget is None:
        raise UserError(
            "--budget is missing: give a number of tokens, a share ('25%', '25% of memory'), or bytes such as 512MiB"
        )
    check_output(options.output)
    text, settings = read_text("--text", options.text), _one_cache(options)
    model, tokenizer = models.load(settings)
    (policy,) = settings.policies
    ids = text_ids(tokenizer, text).to(input_device(model))
    size = f"--budget {options.budget}"
    try:
        budget = budget_of_text(options.size, ids.shape[1], settings.cache_arguments)
    except ValueError as error:
        raise UserError(f"{size}: {error}") from error
    cache = make_paged_cache(model.config, settings, policy, size, budget=budget)
    if not cache.paged_layers:
        raise UserError("no layer of this model keeps all that it has read, so there is nothing to evict")
    with token_bar(notes) as bar:
        task = bar.add_task("reading", total=ids.shape[1])
        for start in range(0, ids.shape[1], options.prefill_chunk_size):
            part = ids[:, start : start + options.prefill_chunk_size]
            try:
                feed(model, part, torch.ones_like(ids[:, : start + part.shape[1]]), cache)
            except ValueError as error:
                raise UserError(f"cannot read {options.text} with {policy} {size}: {error}") from error
            bar.advance(task, part.shape[1])
    try:
        cache.save(options.output, input_ids=ids, model=model)
    except (OSError, ValueError) as error:
        raise UserError(f"--output {options.output}: {error}") from error
    stats = cache.stats()
    evicting = stats.device_bytes - stats.other_bytes
    say(
        notes,
        f"{stats.seen} tokens read, {stats.largest_held} held in a layer at most: {readable_bytes(evicting)}, and "
        f"{readable_bytes(stats.other_bytes)} in layers that evict nothing; "
        f"{readable_bytes(options.output.stat().st_size)} written to {options.output}. In Python: "
        f"PagedEvictionCache.load({str(options.output)!r}, model)",
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


def _one_cache(options: Any) -> Settings:
    """Model and cache of a command that makes one cache, and the attention implementation that its policy wants.

    Args:
        options: `ModelOptions` and `OneCacheOptions`.

    Raises:
        UserError: policy, attention implementation or device cannot be used.
    """
    policy = one_policy(options.policy)
    attention = attention_for([] if policy == AUTO else [policy], options.attn_implementation, options.disposal)
    values = {**model_settings(options).model_dump(), "policies": (policy,), "budgets": (str(options.budget),)}
    settings = Settings(**{**values, "attn_implementation": attention})
    if policy == AUTO and attention is None and why_not_ours(models.load_config(settings)) is None:
        return settings.but(attn_implementation=PAGED_EVICTION)  # which can serve any default
    return settings
