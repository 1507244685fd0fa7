"""What a benchmark was asked to do: everything that decides its numbers."""

from __future__ import annotations

from typing import Any

from hf_paged_eviction import PagedEvictionCache, make_policy

from ..caches.making import profile_noted
from ..errors import UserError
from ..options.base import Options
from ..options.bench import StepOptions, ThroughputOptions
from .methods import METHODS
from .shapes import config_of


class Throughput(ThroughputOptions):
    """Whole answers, prefill included: options of these names, and what others come to.

    Attributes:
        budgets: tokens held per layer and row; each is measured by itself.
        batch_size: prompts that run together; None is all of them, on CUDA as many as memory allows.
        rounds: how often everything is repeated.
    """

    budgets: tuple[int, ...] = (1024,)
    rounds: int = 1


class Prefill(Options):
    """The time to the first token.

    Attributes:
        lengths: tokens of the prompt.
        chunk: tokens per forward where sizes are not compared.
        chunks: sizes that are compared, with the first of the policies.
        policies: that are compared at `chunk`.
        rounds: how often; None = 3 up to 8,192 tokens, else once.
    """

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    chunk: int = 512
    chunks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    policies: tuple[str, ...] = ("paged_eviction", "keydiff", "snapkv", "h2o")
    rounds: int | None = None


class BenchSettings(StepOptions):
    """One run: options of these names, and what others come to.

    Attributes:
        budgets: tokens held per layer and row.
        contexts: empty where no decode steps are measured.
        machine: hardware and versions; numbers of two machines are never mixed in one folder.
    """

    device: str = "cpu"
    budgets: tuple[int, ...] = (1024,)
    throughput: Throughput | None = None
    prefill: Prefill | None = None
    machine: dict[str, Any] | None = None


def as_published(settings: BenchSettings, variant: str) -> BenchSettings:
    """The settings with the cache of a method; as they are for any other variant."""
    return settings.but(**METHODS.get(variant, {}))


def check(settings: BenchSettings) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        UserError: with the way out.
    """
    _check_policy(settings.policy)
    if settings.contexts and settings.steps % settings.block_size:
        whole = -(-settings.steps // settings.block_size) * settings.block_size
        raise UserError(
            f"--steps {settings.steps} must be a multiple of the block size {settings.block_size}, so that every "
            f"timing has the same number of evictions: use {whole}"
        )
    budgets = set(settings.budgets if settings.contexts else ())
    if settings.throughput is not None:
        budgets |= set(settings.throughput.budgets)
    for budget in sorted(budgets):
        _check_budget(settings, budget)
    if settings.contexts and (low := min(settings.budgets)) < 2 * settings.steps:
        raise UserError(
            f"--steps {settings.steps} needs budgets of at least {2 * settings.steps} tokens, the smallest is {low}: "
            "use fewer steps or larger budgets"
        )


def _check_budget(settings: BenchSettings, budget: int) -> None:
    for variant in settings.variants:
        arguments = as_published(settings, variant).cache_arguments
        try:
            with profile_noted():
                PagedEvictionCache(config_of("100m"), budget=budget, **arguments)
        except (TypeError, ValueError) as error:
            of = f" (variant {variant})" if variant in METHODS else ""
            raise UserError(f"--budgets {budget}{of}: {error}") from error


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
