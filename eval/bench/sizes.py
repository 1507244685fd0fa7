"""Budgets in bytes as tokens of the model that is measured."""

from __future__ import annotations

from ..budgets import parse_memory
from ..caches import empty_cache
from ..errors import UserError
from ..models import load_config
from ..settings import Settings
from .settings import BenchSettings
from .shapes import SHAPES, config_of, dtype_of


def tokens_of_sizes(settings: BenchSettings, typed: str) -> tuple[int, ...]:
    """Tokens per layer and row of sizes such as "16MiB,32MiB". No weights are loaded.

    Raises:
        UserError: no size, `full`, or one that is too small.
    """
    return tuple(dict.fromkeys(_tokens(settings, label, size) for label, size in _sizes(typed)))


def _sizes(typed: str) -> list[tuple[str, int]]:
    found = []
    for budget in parse_memory(typed):
        if budget.memory is None:
            raise UserError(f"--memory {typed}: sizes alone; a full cache is the variant full")
        found.append((budget.label, budget.memory))
    return found


def _tokens(settings: BenchSettings, label: str, size: int) -> int:
    shape = settings.model in SHAPES
    loading = None if shape else Settings(**{**settings.common(Settings), "policies": (), "budgets": ()})
    config = (config_of(settings.model) if loading is None else load_config(loading)).get_text_config(decoder=True)
    try:
        dtype = dtype_of(settings.dtype, settings.device, config if loading is not None else None)
        cache = empty_cache(config, dtype, memory=size, policy=settings.policy, **settings.cache_arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--memory {label}: {error}") from error
    return cache.budget or 0
