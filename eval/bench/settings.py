"""What a benchmark was asked to do: everything that decides its numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.policies import make_policy

from ..errors import UserError
from .shapes import config_of


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Whole answers, prefill included.

    Attributes:
        requests: prompts to answer.
        input_tokens, output_tokens: per prompt and per answer.
        budget: tokens held per layer and row.
        batch_size: prompts that run together; None is all of them, on CUDA as many as memory allows.
        rounds: how often everything is repeated.
    """

    requests: int = 64
    input_tokens: int = 1024
    output_tokens: int = 8192
    budget: int = 1024
    batch_size: int | None = None
    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One run.

    Attributes:
        model: a name from `SHAPES`, "embedded", a folder or a name on the Hub.
        trust_remote_code, allow_pickle: as in the settings of an evaluation.
        contexts, budgets: tokens; batch_sizes: rows. Empty contexts: no decode steps are measured.
        variants: names from `VARIANTS`, for the decode steps and for the throughput.
        steps: decoded tokens per timing; whole blocks, so that each timing has its share of evictions.
        rounds: timings per variant.
        threads: of torch on a CPU; None leaves it alone.
        largest_batch: find the largest batch that fits (CUDA only).
        update: also time `update` of one layer.
        goals: the set of goals that the run is held against.
        machine: hardware and versions; numbers of two machines are never mixed in one folder.
    """

    model: str = "100m"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    contexts: tuple[int, ...] = (2048, 8192)
    budgets: tuple[int, ...] = (1024,)
    batch_sizes: tuple[int, ...] = (1,)
    variants: tuple[str, ...] = ()
    policy: str = "paged_eviction"
    block_size: int = 16
    steps: int = 32
    rounds: int = 9
    threads: int | None = None
    largest_batch: bool = False
    update: bool = False
    throughput: Throughput | None = None
    goals: str | None = None
    machine: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The settings as they read back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def check(settings: BenchSettings) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        UserError: with the way out.
    """
    _check_policy(settings.policy)
    if settings.contexts and settings.steps % settings.block_size:
        raise UserError(
            f"--steps {settings.steps} must be whole blocks of {settings.block_size}, so that every timing has the "
            f"same number of evictions: {-(-settings.steps // settings.block_size) * settings.block_size}"
        )
    budgets = set(settings.budgets if settings.contexts else ())
    if settings.throughput is not None:
        budgets.add(settings.throughput.budget)
    for budget in sorted(budgets):
        try:
            PagedEvictionCache(config_of("100m"), budget=budget, block_size=settings.block_size)
        except (TypeError, ValueError) as error:
            raise UserError(f"--budgets {budget}: {error}") from error
    if settings.contexts and (low := min(settings.budgets)) < 2 * settings.steps:
        raise UserError(
            f"--steps {settings.steps}: a cache of {low} tokens is decoded for that long and rewound, which needs a "
            f"budget of {2 * settings.steps} at least; take fewer steps"
        )


def _check_policy(name: str) -> None:
    try:
        policy = make_policy(name)
    except (TypeError, ValueError) as error:
        raise UserError(f"--policy {name}: {error}") from error
    if policy.needs.queries:
        raise UserError(
            f"--policy {name} decides by attention, and a context that is filled with random keys and values has none "
            "to show: choose a policy that reads keys, values or positions"
        )
