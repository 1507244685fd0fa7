"""What a chat was asked for, checked, and the cache that it begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.naming.sizes import parse_bytes
from hf_paged_eviction.options.cache_options import AUTO
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction.table.spans import Spans

from ..caches.contexts import open_context
from ..caches.defaults import one_cache
from ..caches.making import make_paged_cache, policy_of
from ..caches.policy_names import needs_queries
from ..caches.sizes import tokens_of_memory
from ..errors import UserError
from ..options.base import flag
from ..options.cache import OneCacheOptions
from ..options.chat import ANSWER, BUDGET, EMBEDDED_ANSWER, EMBEDDED_BUDGET, ChatOptions
from ..options.files import text_or_file
from ..options.requests import device_for
from ..running.prefill import input_device
from ..running.processes.distributed import launched

#: What cannot be said beside --context, and why.
_AGAINST_A_CONTEXT = {
    **dict.fromkeys(OneCacheOptions.model_fields, "its cache was made with all of these when the text was read"),
    "full": "a full cache would have to read the text, which is not in the file",
    "system": "the conversation begins with the context",
}


def chat_settings(options: ChatOptions) -> ChatOptions:
    """Check what was typed, and fill in what was not: policy, device, attention, sizes, texts of files.

    Raises:
        UserError: something that cannot work.
    """
    if launched() > 1:
        raise UserError("a chat runs in one process: start it without a launcher; --device-map auto splits a model")
    against = options.model_fields_set & _AGAINST_A_CONTEXT.keys() if options.context is not None else set()
    for name in sorted(against):
        raise UserError(
            f"{flag(name)} does not go with --context {options.context}: {_AGAINST_A_CONTEXT[name]}; leave one of "
            "them out"
        )
    for role in options.protected_roles:
        if role not in ("system", "last_user"):
            raise UserError(f"--protect {role}: of a conversation, write system, last_user or both")
    if "system" in options.protected_roles and options.system is None:
        raise UserError("--protect system: there is no system message; give one, --system TEXT or --system @FILE")
    found = options.but(
        device=device_for(options),
        budget=options.budget or str(EMBEDDED_BUDGET if options.on_embedded else BUDGET),
        max_new_tokens=options.max_new_tokens or (EMBEDDED_ANSWER if options.on_embedded else ANSWER),
        system=None if options.system is None else text_or_file("--system", options.system),
    )
    chosen = one_cache(found)
    return found.but(policy=chosen.policies[0], attn_implementation=chosen.attn_implementation)


def make_cache(model: Any, options: ChatOptions, spans: Spans) -> PagedEvictionCache:
    """An empty cache.

    Args:
        spans: of tokens that are never evicted.

    Raises:
        UserError: policy, budget, protected prefix or model do not go together.
    """
    policy, budget, label = options.policy, options.size, f"with a budget of {options.budget}"
    curious = policy != AUTO and needs_queries(policy, options.disposal)
    if curious and model.config._attn_implementation != PAGED_EVICTION:
        model.set_attn_implementation(PAGED_EVICTION)
    if isinstance(budget, str):
        budget = tokens_of_memory(model, options, policy, parse_bytes(budget), f"--budget {budget}")
    protect: dict[str, Any] = {"protect": spans} if options.protected_roles else {}
    cache = make_paged_cache(model.config, options, policy, label, budget=budget, **protect)
    if not cache.paged_layers:
        raise UserError("no layer of this model keeps all that it has read, so there is nothing to evict")
    return cache


def open_cache(model: Any, options: ChatOptions, path: Path) -> PagedEvictionCache:
    """The cache of a saved context.

    Raises:
        UserError: it cannot be used here.
    """
    typed = options.attn_implementation
    cache = open_context(path, model)
    if typed is not None and model.config._attn_implementation != typed:
        raise UserError(
            f"--attn-implementation {typed} does not go with --context {path}: {policy_of(cache)} needs "
            f"{model.config._attn_implementation}; leave it out"
        )
    try:
        row = cache.follow_up(torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)))
    except ValueError as error:
        raise UserError(f"--context {path}: a conversation goes on from one text; {error}") from error
    if not row["attention_mask"].all():
        raise UserError(f"--context {path}: its text was read with pads; read it anew without them")
    return cache
