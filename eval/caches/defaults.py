"""What a command that makes one kind of cache is run with."""

from __future__ import annotations

from typing import Any

from hf_paged_eviction.internals import AUTO, PAGED_EVICTION, why_not_ours

from ..models import loading as models
from ..models.device import model_settings
from ..options.settings import Settings
from .choosing import attention_for
from .policy_names import one_policy


def one_cache(options: Any) -> Settings:
    """Model and cache of a command that makes one cache, and the attention implementation that its policy wants.

    Args:
        options: `ModelOptions` and `OneCacheOptions`.

    Raises:
        UserError: policy, attention implementation or device cannot be used.
    """
    policy = one_policy(options.policy)
    attention = attention_for([] if policy == AUTO else [policy], options.attn_implementation, options.disposal)
    values = {**model_settings(options).model_dump(), "attn_implementation": attention}
    settings = Settings(**{**values, "policies": (policy,), "budgets": (str(options.budget),)})
    return settings.but(attn_implementation=attention_of_default(settings)) if policy == AUTO else settings


def attention_of_default(settings: Settings) -> str | None:
    """The attention implementation with which any default can be served, or the one that was chosen before.

    Raises:
        UserError: there is no such model.
    """
    config = models.load_config(settings)
    wanted = settings.attn_implementation is None and why_not_ours(config) is None
    return PAGED_EVICTION if wanted else settings.attn_implementation
