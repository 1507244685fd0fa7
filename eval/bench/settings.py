"""What a benchmark was asked to do: everything that decides its numbers."""

from __future__ import annotations

from typing import Any

from hf_paged_eviction import PagedEvictionCache, make_policy

from ..caches.making import profile_noted
from ..errors import UserError
from ..options.bench import StepOptions, ThroughputOptions
from .methods import FLOOR, FULL, METHODS, PAGED
from .rows import DECODE, PREFILL, THROUGHPUT
from .shapes import config_of

PAPER, QUICK = "paper", "quick"
#: Shapes of the models that arXiv 2509.04377 measured.
PAPER_MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
#: Settings with a name; without one, decode steps are measured.
PRESETS: dict[str, dict[str, Any]] = {
    PAPER: {
        "kinds": (THROUGHPUT,),
        "model": PAPER_MODELS[0],
        "variants": (FULL, *METHODS),
        "budgets": (256, 512, 1024, 2048, 4096),
    },
    PREFILL: {
        "kinds": (PREFILL,),
        "model": "prefill",
        "variants": (),
        "contexts": (2048, 4096, 8192, 16384, 32768, 65536),
    },
    QUICK: {
        "kinds": (DECODE, THROUGHPUT, PREFILL),
        **{"contexts": (2048,), "budgets": (256,), "variants": (FLOOR, PAGED, FULL), "steps": 16, "rounds": 3},
        **{"requests": 2, "input_tokens": 512, "output_tokens": 32},
        **{"chunk": 256, "chunks": (), "policies": ("paged_eviction",)},
    },
}


class BenchSettings(StepOptions, ThroughputOptions):
    """One run: options of these names, and what others come to.

    Attributes:
        kinds: what is measured.
        contexts: tokens before a decode step, and lengths of prompts.
        budgets: tokens held per layer and row.
        chunk: tokens of a prompt per forward, where sizes are not compared.
        chunks: sizes that are compared, with the first of the policies.
        policies: that are compared at `chunk`.
        machine: hardware and versions; numbers of two machines are never mixed in one folder.
    """

    kinds: tuple[str, ...] = (DECODE,)
    device: str = "cpu"
    budgets: tuple[int, ...] = (1024,)
    chunk: int = 512
    chunks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    policies: tuple[str, ...] = ("paged_eviction", "keydiff", "snapkv", "h2o")
    machine: dict[str, Any] | None = None

    def rounds_of_answers(self, alone: int) -> int:
        """How often answers or prompts are timed: once beside decode steps, else as asked for, or `alone`."""
        if DECODE in self.kinds:
            return 1
        return self.rounds if "rounds" in self.model_fields_set else alone


def as_published(settings: BenchSettings, variant: str) -> BenchSettings:
    """The settings with the cache of a method; as they are for any other variant."""
    return settings.but(**METHODS.get(variant, {}))


def check(settings: BenchSettings) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        UserError: with the way out.
    """
    _check_policy(settings.policy)
    for budget in sorted(settings.budgets):
        _check_budget(settings, budget)
    if DECODE not in settings.kinds:
        return
    if settings.steps % settings.block_size:
        whole = -(-settings.steps // settings.block_size) * settings.block_size
        raise UserError(
            f"--steps {settings.steps} must be a multiple of the block size {settings.block_size}, so that every "
            f"timing has the same number of evictions: use {whole}"
        )
    if (low := min(settings.budgets)) < 2 * settings.steps:
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
