"""What a user asks of a cache, checked before anything is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch.nn import Module
from transformers import PretrainedConfig

from .allocators import BudgetAllocator, Given, HeadAllocator, LayerAllocator, Uniform, make_allocator
from .allocators.budgets import given_shares
from .allocators.cutoff import check_cutoff
from .allocators.threshold import Global, check_common_unit
from .defaults import Default
from .disposals import Disposal, Surroundings, make_disposal
from .lab.low_rank.basis import Basis, chosen_basis
from .masks.models import check_model, is_latent_attention, mixes_heads, why_not_ours
from .policies import EvictionPolicy, make_policy
from .policies.needs import Heads
from .precision.codec import check_bits
from .queries.attention import PAGED_EVICTION, ModelAttention
from .table.budget import BlockBudget
from .table.gaps import Positions
from .table.memory import parse_bytes


def check_config(config: object) -> None:
    """Raise TypeError unless `config` is the configuration of a model."""
    if isinstance(config, PretrainedConfig):
        return
    if isinstance(config, Module):
        raise TypeError(
            f"The first argument is a model ({type(config).__name__}): pass its configuration, model.config."
        )
    given = "None" if config is None else f"a {type(config).__name__}"
    raise TypeError(f"The first argument must be the configuration of the model, model.config; got {given}.")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_instance(name: str, value: object, kind: type[Any]) -> None:
    """Raise TypeError unless `value` is None or of this class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} object or None, got {value!r}.")


def with_share(
    protection: tuple[int | None, int, int | None], share: float | None, budget: object, block_size: object
) -> tuple[int | None, int, int | None]:
    """What is protected, with a share of the budget in whole blocks for the newest tokens where they were not given."""
    sinks, prefix, recent = protection
    known = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in (budget, block_size))
    if recent is None and share is not None and known:
        recent = max(1, int(share * cast(int, budget)) // cast(int, block_size)) * cast(int, block_size)
    return sinks, prefix, recent


def chosen_heads(given: object, policy: EvictionPolicy, allocator: BudgetAllocator, config: Any) -> Heads:
    """What `heads=` means for a policy, an allocator and a model.

    Raises:
        ValueError: it is none of the choices.
    """
    if given is None:
        apart = isinstance(allocator, HeadAllocator | Global) or (
            policy.needs.heads == "separate" and not mixes_heads(config)
        )
        return "separate" if apart else "shared"
    if given not in ("shared", "separate"):
        raise ValueError(f'heads must be "shared", "separate" or None for what the policy says, got {given!r}.')
    return given


def _coded(**given: tuple[int | None, int | None]) -> str:
    """The names of the options that ask for something."""
    return " and ".join(f"{name}=" for name, pair in given.items() if pair != (None, None))


@dataclass(frozen=True)
class CheckedOptions:
    """The arguments of `PagedEvictionCache` that say what its layers are like.

    Attributes:
        sizes: tokens of a layer, on average over layers; of a list of budgets the smallest.
        protection: `sink_tokens`, `protected_prefix` and `recent_tokens` as they were given, or `sink_tokens` as the
            policy was published with.
        recent_share: share of the budget for the newest tokens where `recent_tokens` was not given; None = one block.
        policy, heads, allocator, disposal, positions, static: see there.
        bits, ranks: of keys and of values.
        basis: where there are ranks.
        why_not_ours: why the model cannot use the attention implementation "paged_eviction"; None = it can.
    """

    sizes: BlockBudget
    protection: tuple[int | None, int, int | None]
    recent_share: float | None
    policy: EvictionPolicy
    heads: Heads
    allocator: BudgetAllocator
    disposal: Disposal
    positions: Positions
    bits: tuple[int | None, int | None]
    ranks: tuple[int | None, int | None]
    basis: Basis | None
    static: bool
    why_not_ours: str | None

    @classmethod
    def check(
        cls,
        config: Any,
        budget: int | Sequence[int] | None,
        keep_ratio: float | None,
        memory: int | str | None,
        block_size: int,
        protection: tuple[int | None, int, int | None],
        *,
        default: Default,
        heads: Heads | None,
        disposal: str | Disposal,
        positions: Positions,
        bits: int | tuple[int | None, int | None] | None,
        rank: int | tuple[int | None, int | None] | None,
        basis: str | Path | Basis | None,
        static: bool,
        inside_encoder_decoder: bool,
    ) -> "CheckedOptions":
        """Check what the user asked for.

        Raises:
            TypeError, ValueError: sizes, policy or model that cannot work; the message says what would.
        """
        latent = is_latent_attention(config)
        scorer, shares, precision = make_policy(default.policy), make_allocator(default.allocator), check_bits(bits)
        if isinstance(budget, Sequence) and not isinstance(budget, str | bytes):
            budget, shares = given_shares(budget, shares)
        if protection[0] is None:
            sinks = scorer.needs.sink_tokens if default.sinks is None else default.sinks
            protection = (sinks, *protection[1:])
        most_bytes = None if memory is None else parse_bytes(memory)
        tokens, kept = cast(int | None, budget), with_share(protection, default.recent, budget, block_size)
        sizes = BlockBudget.validate(tokens, keep_ratio, block_size, *kept, memory=most_bytes)
        if sizes.tokens is None and protection[2] is None:
            sizes = replace(sizes, recent_share=default.recent)
        heads = chosen_heads(heads, scorer, shares, config)
        if positions not in ("text", "cache"):
            raise ValueError(f'positions must be "text" or "cache", got {positions!r}.')
        check_model(config, inside_encoder_decoder, heads)
        scorer.check_model(config)
        if latent and not scorer.needs.supports_mla:
            raise ValueError(
                f"The policy {scorer.name!r} reads keys and values as attention compares and sums them, but this model "
                "caches latents (MLA). Use one that does not, such as 'keydiff', 'streaming_llm' or 'random'."
            )
        ranks, directions = chosen_basis(rank, basis, config)
        made = make_disposal(disposal)
        made.check(
            Surroundings(
                config.get_text_config(decoder=True),
                *(sizes, scorer, heads, static),
                uniform=isinstance(shares, Uniform) and scorer.needs.cutoff is None,
                latent=latent,
                positions=positions,
                coded=_coded(bits=precision, rank=ranks),
            )
        )
        reason = why_not_ours(config)
        return cls(
            *(
                sizes,
                protection,
                default.recent,
                scorer,
                heads,
                shares,
                made,
                positions,
                precision,
                ranks,
                directions,
                static,
                reason,
            )
        )

    def check_together(self) -> None:
        """Refuse an allocator, or a policy that takes its place, that does not go together with the rest.

        Raises:
            ValueError: with the reason and the way out.
        """
        allocator = self.allocator
        check_cutoff(self.sizes, self.policy, allocator, self.static)
        if self.sizes.keep_ratio is not None and not (self.uniform or isinstance(allocator, Global)):
            raise ValueError(f"The allocator {allocator.name!r} needs budget= in tokens, not keep_ratio=.")
        if self.sizes.memory is not None and not self._bounded_in_bytes:
            raise ValueError(
                f"The allocator {allocator.name!r} shares tokens out among rows or heads, and memory= turns into "
                "tokens only when a prompt arrives: give budget= in tokens, or use allocator='uniform' or 'pyramid'."
            )
        if isinstance(allocator, HeadAllocator) and self.heads != "separate":
            raise ValueError(f'The allocator {allocator.name!r} shares out among KV heads: use heads="separate".')
        if self.static and not self.uniform:
            raise ValueError(
                f"static=True needs layers and heads of one size, and {allocator.name!r} makes them differ: use "
                "allocator='uniform' and one number as budget."
            )
        if isinstance(allocator, Global):
            check_common_unit(self.policy)

    @property
    def _bounded_in_bytes(self) -> bool:
        """Whether the total in tokens says what all layers take."""
        if isinstance(self.allocator, Global):
            coded = self.bits != (None, None) or self.basis is not None
            return not coded and self.positions == "text" and self.disposal.name == "drop"  # else as the longest head
        return not isinstance(self.allocator, LayerAllocator | HeadAllocator)

    @property
    def uniform(self) -> bool:
        """Whether all layers, rows and heads hold equally many tokens."""
        return isinstance(self.allocator, Uniform) and self.policy.needs.cutoff is None

    # ---- attention ------------------------------------------------------------------------------------------------

    @property
    def needs_our_attention(self) -> bool:
        """Whether the model must use the attention implementation "paged_eviction"."""
        return self.policy.needs.queries or not self.uniform or self.disposal.needs_queries

    def check_attention(self, attention: ModelAttention) -> None:
        """Refuse an attention implementation that gives wrong results, or does not serve what was asked for.

        Raises:
            ValueError: with the way out.
        """
        if attention.shows_queries and self.why_not_ours is not None:
            raise ValueError(
                f"{self.why_not_ours}, so the attention implementation {PAGED_EVICTION!r} would give wrong results "
                "without a message. Load the model with another, such as attn_implementation='eager', and choose a "
                "policy that needs no queries and allocator='uniform'."
            )
        if attention.shows_queries or not self.needs_our_attention:
            return
        if self.disposal.needs_queries:
            reason = f"disposal={self.disposal.label!r} takes part in attention, and only"
        elif self.policy.needs.queries:
            reason = f"The policy {self.policy.label!r} decides by queries or attention, and only"
        else:
            what, who = ("allocator", self.allocator) if self.policy.needs.cutoff is None else ("policy", self.policy)
            reason = f"With the {what} {who.label!r} layers or heads hold different numbers, and only"
        reason = f"{reason} the attention implementation {PAGED_EVICTION!r} can serve that"
        if self.why_not_ours is not None:
            raise ValueError(
                f"{reason}; but {self.why_not_ours}. Choose a policy that needs no queries and allocator='uniform'."
            )
        raise ValueError(
            f"{reason}; this model uses {attention.name!r}. Before the cache is made:\n"
            f"    model.set_attn_implementation({PAGED_EVICTION!r})\n"
            f"or load the model with attn_implementation={PAGED_EVICTION!r}."
        )

    # ---- another budget -------------------------------------------------------------------------------------------

    def shrunk(self, budget: int | Sequence[int], present: int | None) -> "CheckedOptions":
        """The same with a smaller budget.

        Args:
            budget: in tokens; a list where there is one.
            present: the budget so far, once known.

        Raises:
            TypeError, ValueError: a budget that cannot be, or that is larger.
        """
        if isinstance(budget, Sequence) and not isinstance(budget, str | bytes):
            return self._shrunk_list(budget)
        kept = with_share(self.protection, self.recent_share, budget, self.sizes.block_size)
        sizes = BlockBudget.validate(cast(int, budget), None, self.sizes.block_size, *kept)
        if isinstance(self.allocator, Given):
            raise ValueError(
                f"The layers of this cache were given budgets of their own, {list(self.allocator.tokens)}, and one "
                "number does not say how to share it out: pass a list of smaller ones."
            )
        self.disposal.check_sizes(sizes)
        if present is not None and sizes.capacity > present:
            raise ValueError(
                f"shrink({sizes.capacity}) would be growth: the budget is {present}, and evicted tokens cannot come "
                "back. Make a new cache."
            )
        return replace(self, sizes=sizes)

    def _shrunk_list(self, budgets: Sequence[int]) -> "CheckedOptions":
        if not isinstance(self.allocator, Given):
            raise ValueError(
                "The layers of this cache share one budget, and a list gives each its own: make the cache with a list "
                "as budget=, or shrink to a number."
            )
        least, shares = given_shares(budgets, Uniform())
        kept = with_share(self.protection, self.recent_share, least, self.sizes.block_size)
        sizes = BlockBudget.validate(least, None, self.sizes.block_size, *kept)
        shares.budgets(sizes, len(self.allocator.tokens))
        if any(new > old for new, old in zip(shares.tokens, self.allocator.tokens, strict=True)):
            raise ValueError(
                f"shrink({list(shares.tokens)}) would be growth: the budgets are {list(self.allocator.tokens)}, and "
                "evicted tokens cannot come back. Make a new cache."
            )
        return replace(self, sizes=sizes, allocator=shares)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def settings(self, present: int | None = None) -> dict[str, Any]:
        """The arguments that make such a cache, as JSON.

        Args:
            present: the budget in tokens, once known.

        Raises:
            ValueError: it has a `basis`, which no settings hold.
        """
        if self.basis is not None:
            raise ValueError(
                "rank= keeps tokens as coefficients, which mean nothing without the very basis that made them, and "
                "that is not in the file. Save a cache without rank=, with bits= where it has to be small."
            )
        sinks, prefix, recent = self.protection
        if self.recent_share is not None:
            recent = with_share(self.protection, self.recent_share, present, self.sizes.block_size)[2]
        given = self.allocator if isinstance(self.allocator, Given) else None
        return {
            "budget": self.sizes.tokens if given is None else list(given.tokens),
            "keep_ratio": self.sizes.keep_ratio,
            "memory": self.sizes.memory,
            "block_size": self.sizes.block_size,
            "policy": self.policy.label,
            "heads": self.heads,
            "sink_tokens": None if sinks is None else int(sinks),
            "protected_prefix": int(prefix),
            "recent_tokens": None if recent is None else int(recent),
            "allocator": self.allocator.label if given is None else "uniform",
            "disposal": self.disposal.label,
            "positions": self.positions,
            "bits": list(self.bits),
            "static": self.static,
        }
