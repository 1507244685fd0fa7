"""The policy of a command where nobody names one."""

from __future__ import annotations

from typing import Any

from hf_paged_eviction.masks.models import why_not_ours
from hf_paged_eviction.options.cache_options import AUTO
from hf_paged_eviction.options.checked import with_share
from hf_paged_eviction.options.defaults import Default, defaults
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from . import models
from .policy_names import needs_queries, one_policy
from .requests import attention_for, model_settings
from .settings import Settings


def one_cache(options: Any) -> Settings:
    """Model and cache of a command that makes one kind of cache, with the policy by its name.

    Args:
        options: `ModelOptions` and `OneCacheOptions`.

    Raises:
        UserError: policy, attention implementation or device cannot be used.
    """
    policy = one_policy(options.policy)
    attention = attention_for([] if policy == AUTO else [policy], options.attn_implementation, options.disposal)
    found = {**model_settings(options).model_dump(), "attn_implementation": attention}
    return settled(Settings(**{**found, "policies": (policy,), "budgets": (str(options.budget),)}))


def settled(settings: Settings, pages: bool = False) -> Settings:
    """The same with a policy by its name where it says "auto", and with the first and newest tokens that go with it.

    Args:
        settings: of one policy and one budget.
        pages: of continuous batching, where all layers and heads hold equally many tokens.

    Raises:
        UserError: there is no such model.
    """
    if settings.policies != (AUTO,):
        return settings
    config = models.load_config(settings)
    found = next(each for each in defaults(config) if _serves(each, config, settings, pages))
    needed = PAGED_EVICTION if needs_queries(found.name) else settings.attn_implementation
    chosen: dict[str, Any] = {"policies": (found.name,), "attn_implementation": needed}
    if settings.sink_tokens is None:
        chosen["sink_tokens"] = found.sinks
    budget = settings.budgets[0]
    if settings.recent_tokens is None and budget.isdecimal():
        chosen["recent_tokens"] = with_share(None, found.recent, int(budget), settings.block_size)
    return settings.but(**chosen)


def _serves(default: Default, config: Any, settings: Settings, pages: bool) -> bool:
    if not needs_queries(default.name):
        return True
    given = settings.attn_implementation
    plain = settings.disposal == "drop" and settings.bits is None
    equal = pages or not plain or settings.positions != "text" or not settings.budgets[0].isdecimal()
    return not equal and given in (None, PAGED_EVICTION) and why_not_ours(config) is None
