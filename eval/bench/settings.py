"""What a benchmark was asked to do: everything that decides its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_paged_eviction import PagedEvictionCache, make_policy

from ..caches.making import empty_cache, profile_noted
from ..errors import UserError
from ..models.device import check_device
from ..models.environment import best_device
from ..models.loading import load_config
from ..options.bench import BenchOptions, StepOptions
from ..options.model import Loading
from ..options.settings import Settings
from .shapes import FOR_A_CPU, SHAPES, config_of, dtype_of


class BenchSettings(StepOptions):
    """One run. Fields have the names of options, with checked values.

    Attributes:
        budgets: tokens held per layer and row.
        machine: hardware and versions; numbers of two machines are never mixed in one folder.
    """

    device: str = "cpu"
    budgets: tuple[int, ...] = (1024,)
    machine: dict[str, Any] | None = None


def read(options: BenchOptions, known: Sequence[str]) -> BenchSettings:
    """The settings of a run, refused before anything is loaded if they cannot be measured.

    Args:
        known: names of variants; all of them run where none is named.

    Raises:
        UserError: with the way out.
    """
    if unknown := [name for name in options.variants if name not in (*known, "all")]:
        raise UserError(f"unknown variant {unknown[0]} (--variants); choose from {', '.join(known)}, all")
    device = options.device or ("cpu" if options.model in FOR_A_CPU else best_device())
    values = {
        **options.common(BenchSettings),
        "device": check_device(device),
        "variants": known if "all" in options.variants else options.variants or known,
        "budgets": (),
    }
    settings = BenchSettings(**values)
    settings = settings.but(budgets=tuple(dict.fromkeys(_tokens(settings, budget) for budget in options.budgets)))
    _check_policy(settings.policy)
    for budget in sorted(settings.budgets):
        try:
            with profile_noted():
                PagedEvictionCache(config_of("100m"), budget=budget, **settings.cache_arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"--budgets {budget}: {error}") from error
    _check_steps(settings)
    return settings


def _check_steps(settings: BenchSettings) -> None:
    if settings.steps % settings.block:
        whole = -(-settings.steps // settings.block) * settings.block
        raise UserError(
            f"--steps {settings.steps} must be a multiple of the block size {settings.block}, so that every "
            f"timing has the same number of evictions: use {whole}"
        )
    if (low := min(settings.budgets)) < 2 * settings.steps:
        raise UserError(
            f"--steps {settings.steps} needs budgets of at least {2 * settings.steps} tokens, the smallest is {low}: "
            "use fewer steps or larger budgets"
        )


def _check_policy(name: str) -> None:
    try:
        policy = make_policy(name)
    except (TypeError, ValueError) as error:
        raise UserError(f"--policy {name}: {error}") from error
    if policy.needs.queries:
        raise UserError(
            f"--policy {name} needs attention, and the benchmark fills its context with random keys and values, "
            "without any: choose a policy that reads keys, values or positions"
        )


def _tokens(settings: BenchSettings, size: int | str) -> int:
    """A budget in tokens per layer and row. No weights are loaded.

    Raises:
        UserError: it is too small.
    """
    if isinstance(size, int):
        return size
    shape = settings.model in SHAPES
    loading = None if shape else Settings(**{**settings.common(Loading), "policies": (), "budgets": ()})
    config = (config_of(settings.model) if loading is None else load_config(loading)).get_text_config(decoder=True)
    try:
        dtype = dtype_of(settings.dtype, settings.device, None if shape else config)
        cache = empty_cache(config, dtype, budget=size, policy=settings.policy, **settings.cache_arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--budgets {size}: {error}") from error
    return cache.budget or 0
