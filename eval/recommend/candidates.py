"""What is compared: combinations of policy, allocator, bits, positions and disposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hf_paged_eviction.allocators import Global, HeadAllocator, make_allocator
from hf_paged_eviction.disposals.registry import make_disposal
from hf_paged_eviction.options.defaults import AUTO, defaults

from ..caches.budgets import FULL, ORACLE
from ..caches.policy_names import ALL, UNIFORM, choose_policies, needs_queries, split_list, split_name
from ..errors import UserError
from ..options.cache import CacheOptions
from ..options.recommend import GridOptions, precisions

DROP, TEXT = "drop", "text"


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Attributes:
        bits: as `--bits` of a cache is given, "8" or "8,4"; None is the model's own precision.
    """

    policy: str
    allocator: str = UNIFORM
    bits: str | None = None
    positions: str = TEXT
    disposal: str = DROP

    @property
    def policy_name(self) -> str:
        """With the allocator behind an @, unless it is uniform."""
        return self.policy if self.allocator == UNIFORM else f"{self.policy}@{self.allocator}"

    @property
    def label(self) -> str:
        """What rows and tables call it."""
        bits = self.bits and self.bits.replace(",", "/")
        more = [("bits", bits, None), ("positions", self.positions, TEXT), ("disposal", self.disposal, DROP)]
        named = (f"{name}={value}" for name, value, usual in more if value != usual)
        return ", ".join([self.policy_name, *named])

    @property
    def needs_queries(self) -> bool:
        """Whether it works with the attention implementation "paged_eviction" only."""
        return needs_queries(self.policy_name) or bool(make_disposal(self.disposal).needs_queries)

    def options(self, base: CacheOptions) -> CacheOptions:
        """Options of a cache: those that all candidates share, and its own."""
        own = {"bits": self.bits, "positions": self.positions, "disposal": self.disposal}
        return CacheOptions(**{**{name: getattr(base, name) for name in CacheOptions.model_fields}, **own})

    def arguments(self, base: CacheOptions) -> dict[str, Any]:
        """Arguments of `PagedEvictionCache` that are not its defaults, without the budget."""
        found: dict[str, Any] = {"policy": self.policy}
        if self.allocator != UNIFORM:
            found["allocator"] = self.allocator
        given, usual = self.options(base).cache_arguments, CacheOptions().cache_arguments
        if isinstance(make_allocator(self.allocator), HeadAllocator | Global):
            given["heads"] = "separate"
        return found | {name: value for name, value in given.items() if value != usual[name]}

    def flags(self, base: CacheOptions) -> list[str]:
        """The same as options of a command, without the budget."""
        found = ["--policy", self.policy_name]
        given, usual = self.options(base), CacheOptions()
        for name in CacheOptions.model_fields:
            if getattr(given, name) != getattr(usual, name):
                found += ["--" + name.replace("_", "-"), str(getattr(given, name))]
        return found


def grid(options: GridOptions) -> tuple[Candidate, ...]:
    """Every combination, whether a model takes it or not.

    Raises:
        UserError: a policy, allocator or disposal does not exist.
    """
    policies = choose_policies(options.policies)
    for name in policies:
        if name in (FULL, ALL) or split_name(name)[0] in (ORACLE, AUTO):
            raise UserError(f"--policies {name}: not a policy that a cache can be given")
        if split_name(name)[1] != UNIFORM:
            raise UserError(f"--policies {name}: name allocators in --allocators, {split_name(name)[1]} there")
    allocators = _checked("allocators", split_list(options.allocators), make_allocator)
    disposals = _checked("disposals", split_list(options.disposals), make_disposal)
    positions = options.positions.split(",")
    choices = product(policies, allocators, precisions(options.bits), positions, disposals)
    return tuple(dict.fromkeys(Candidate(*each) for each in choices))


def with_defaults(candidates: Sequence[Candidate], config: Any) -> tuple[Candidate, ...]:
    """These, and what a cache would take by itself for the model, such as its calibration."""
    own = [Candidate(str(each.policy), str(each.allocator)) for each in defaults(config)]
    return tuple(dict.fromkeys((*candidates, *own)))


def _checked(option: str, names: Sequence[str], make: Any) -> list[str]:
    if not names:
        raise UserError(f"--{option}: name at least one")
    for name in names:
        try:
            make(name)
        except (TypeError, ValueError) as error:
            raise UserError(f"--{option} {name}: {error}") from error
    return list(names)
