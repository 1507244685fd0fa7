"""The options of a cache, checked."""

from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from torch.nn import Module
from transformers import PretrainedConfig

from ..allocators import (
    BudgetAllocator,
    FixedAllocator,
    HeadAllocator,
    LayerAllocator,
    Uniform,
    make_allocator,
)
from ..allocators.registry import ALLOCATORS
from ..disposals import Disposal, DisposalContext, make_disposal
from ..integration.models import check_model, is_latent_attention, mixes_heads, why_not_ours
from ..learned.lookup import find_calibration, why_none
from ..policies import EvictionPolicy, make_policy
from ..policies.needs import Heads
from ..policies.registry import POLICIES
from ..precision.base import Precision, make_precision
from ..queries.attention import PAGED_EVICTION, ModelAttention
from ..table.budget import BlockBudget, whole_number
from ..table.gaps import Positions
from .cache_options import AUTO, CacheOptions
from .defaults import Default


def check_config(config: object) -> None:
    """Raise TypeError unless `config` is the configuration of a model."""
    if isinstance(config, PretrainedConfig):
        return
    if isinstance(config, Module):
        raise TypeError(
            f"The first argument is a model ({type(config).__name__}): pass its configuration, model.config."
        )
    described = "None" if config is None else f"a {type(config).__name__}"
    raise TypeError(f"The first argument must be the configuration of the model, model.config; got {described}.")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def profile_path(profile: object) -> str | None:
    """The option `profile` as text.

    Raises:
        TypeError: it is not a path.
    """
    if profile is None:
        return None
    if not isinstance(profile, str | PathLike):
        raise TypeError(
            f"profile must be the path of a file that prepare wrote, got {profile!r}. A table of shares in "
            "memory is given as an object: allocator=Heads.of(table)."
        )
    return str(profile)


def reads_profile(policy: object, allocator: object = None) -> bool:
    """Whether this policy (a name or an object; "auto" may) or allocator reads a profile."""
    return policy == AUTO or POLICIES.reads_profile(policy) or ALLOCATORS.reads_profile(allocator)


def _find_profile(config: Any, default: Default) -> str | None:
    """The profile for names that read one: the one of the default, or of the weights."""
    named = [thing for thing in (default.policy, default.allocator) if isinstance(thing, str)]
    if default.profile is not None or not any(map(reads_profile, named, named)):
        return default.profile
    found = find_calibration(config)
    if found is None:
        wanted = next(name for name in named if reads_profile(name, name))
        raise ValueError(f"{wanted!r} reads a profile, and {why_none(config)}.")
    return str(found)


def _check_one_profile(policy: EvictionPolicy, allocator: BudgetAllocator, given: str | None, auto: bool) -> None:
    """Refuse two profiles, and one that nothing reads.

    Raises:
        ValueError: with what to do.
    """
    digests = {**policy.profile_digests, **allocator.profile_digests}
    if len({*digests.values()}) > 1:
        raise ValueError(f"Policy and allocator read different profiles, {', '.join(digests)}: a cache has one.")
    if given is not None and not digests and not auto:
        raise ValueError(
            f"profile={given!r} would not be read: neither the policy {policy.label!r} nor the allocator "
            f"{allocator.label!r} reads one. Leave profile= out, or use policy='observed', allocator='heads'."
        )


def _sizes(user_options: CacheOptions, default: Default, budget: Any, sinks: int | None) -> BlockBudget:
    """Sizes, with as many of the newest tokens as the default wants; without, where there is no room.

    Raises:
        TypeError, ValueError: see `BlockBudget.validate`.
    """
    share, block_size = default.recent, user_options.block_size
    block_size = default.block_size if block_size is None else block_size
    sizes = budget, block_size, sinks, user_options.recent_tokens, user_options.protect
    if share is not None and user_options.recent_tokens is None:
        try:
            return BlockBudget.validate(*sizes, share)
        except ValueError:  # raised again, unless it is for want of room
            pass
    return BlockBudget.validate(*sizes)


def first_tokens(sink_tokens: int | None, policy: EvictionPolicy, block_size: int) -> int:
    """Number of protected first tokens: `sink_tokens`, or the number the policy was published with, or one block.

    Raises:
        TypeError, ValueError: `sink_tokens` is not a number of tokens.
    """
    usual = policy.needs.sink_tokens if sink_tokens is None else sink_tokens
    return whole_number("block_size", block_size, 1) if usual is None else whole_number("sink_tokens", usual, 0)


def chosen_heads(heads: object, policy: EvictionPolicy, allocator: BudgetAllocator, config: Any) -> Heads:
    """Resolve the option `heads` for a policy, an allocator and a model.

    Raises:
        ValueError: `heads` is not one of the choices.
    """
    if heads is None:
        apart = allocator.divides_heads or (policy.needs.heads == "separate" and not mixes_heads(config))
        return "separate" if apart else "shared"
    if heads not in ("shared", "separate"):
        raise ValueError(f'heads must be "shared", "separate" or None for what the policy says, got {heads!r}.')
    return heads


@dataclass(frozen=True)
class CheckedOptions:
    """The options of a cache, checked and made into objects.

    Attributes:
        sizes: mean sizes of a layer.
        policy, heads, allocator, disposal, positions, static: see `CacheOptions`.
        precision: precision for `bits`; None = the model's dtype.
        why_not_ours: why the model cannot use the attention implementation "paged_eviction"; None = it can.
        context: what the disposal was told.
    """

    sizes: BlockBudget
    policy: EvictionPolicy
    heads: Heads
    allocator: BudgetAllocator
    disposal: Disposal
    positions: Positions
    precision: Precision | None
    static: bool
    why_not_ours: str | None
    context: DisposalContext

    @classmethod
    def check(cls, config: Any, user_options: CacheOptions, default: Default) -> "CheckedOptions":
        """Check the user's options.

        Args:
            config: `model.config`.
            default: policy and allocator, which replace those of the user.

        Raises:
            TypeError, ValueError: sizes, policy or model cannot work; the message says what would.
        """
        latent = is_latent_attention(config)
        check_flag("static", user_options.static)
        profile = _find_profile(config, default)
        policy, shares, precision = (
            make_policy(default.policy, profile),
            make_allocator(default.allocator, profile),
            make_precision(default.bits if user_options.bits is None else user_options.bits),
        )
        _check_one_profile(policy, shares, default.profile, user_options.policy == AUTO)
        budget: Any = user_options.budget
        usual = policy.needs.sink_tokens if default.sinks is None else default.sinks
        sinks = usual if user_options.sink_tokens is None else user_options.sink_tokens
        sizes = _sizes(user_options, default, budget, sinks)
        heads = chosen_heads(user_options.heads, policy, shares, config)
        if user_options.positions not in ("text", "cache"):
            raise ValueError(f'positions must be "text" or "cache", got {user_options.positions!r}.')
        check_model(config, heads)
        if user_options.positions == "cache" and (latent or precision is not None):
            what = "bits=, which rounds keys" if precision is not None else "latents (MLA)"
            raise ValueError(
                f'positions="cache" rotates the held keys and cannot be combined with {what}: use '
                f'positions="text"{"" if latent else ", or leave out bits="}.'
            )
        policy.check_model(config)
        shares.check_model(config)
        if latent and not policy.needs.supports_mla:
            raise ValueError(
                f"The policy {policy.name!r} needs keys and values, but this model caches latents (MLA). Use one "
                "that works with latents, such as 'keydiff', 'streaming_llm' or 'random'."
            )
        if precision is not None:
            precision.check_model(config)
        disposal = make_disposal(user_options.disposal)
        context = DisposalContext(
            config.get_text_config(decoder=True),
            sizes,
            policy,
            user_options.static,
            uniform=isinstance(shares, Uniform),
            latent=latent,
            positions=user_options.positions,
            coded=precision is not None,
        )
        disposal.check(context)
        return cls(
            sizes=sizes,
            policy=policy,
            heads=heads,
            allocator=shares,
            disposal=disposal,
            positions=user_options.positions,
            precision=precision,
            static=user_options.static,
            why_not_ours=why_not_ours(config),
            context=context,
        )

    def check_disposal(self, sizes: BlockBudget) -> None:
        """Raise ValueError if the disposal cannot work with these sizes and the other options."""
        self.disposal.check(replace(self.context, sizes=sizes))

    def check_together(self) -> None:
        """Refuse an allocator, or a policy that decides budgets itself, that cannot be combined with the other options.

        Raises:
            ValueError: not possible; the message gives the reason and what to use instead.
        """
        allocator = self.allocator
        self._check_spans(self.sizes)
        if self.sizes.keep_ratio is not None and not (self.uniform or self._spans_layers):
            raise ValueError(f"The allocator {allocator.name!r} needs budget= in tokens, not as a share of the prompt.")
        if self.sizes.in_bytes and not self._bounded_in_bytes:
            plain = ", or positions='text' and disposal='drop'" if self._spans_layers else ""
            raise ValueError(
                f"The allocator {allocator.name!r} divides tokens among rows or heads, but bytes become tokens "
                "only when a prompt arrives: give budget= in tokens, or use allocator='uniform' or "
                f"'pyramid'{plain}."
            )
        if allocator.divides_heads and self.heads != "separate":
            raise ValueError(
                f'The allocator {allocator.name!r} divides the budget among KV heads: use heads="separate".'
            )

    def _check_spans(self, sizes: BlockBudget) -> None:
        shared = isinstance(self.allocator, LayerAllocator | FixedAllocator) and not isinstance(self.allocator, Uniform)
        if shared and len(sizes.spans) > 1:
            raise ValueError(
                f"protect= has spans for {len(sizes.spans)} rows, and the allocator {self.allocator.name!r} "
                "divides one budget for all rows. Give one list of pairs for all rows, or use allocator='uniform'."
            )

    @property
    def _spans_layers(self) -> bool:
        """Whether one budget is shared out among the heads of all layers, without padding."""
        return self.allocator.divides_heads and not isinstance(self.allocator, HeadAllocator)

    @property
    def _bounded_in_bytes(self) -> bool:
        """Whether the total in tokens says what all layers take."""
        if self._spans_layers:
            # Otherwise every head takes as much as the longest one.
            return self.disposal.name == "drop" and self.positions == "text"
        return not isinstance(self.allocator, LayerAllocator | HeadAllocator)

    @property
    def profile(self) -> tuple[str, str] | None:
        """The profile that policy and allocator read, and the digest of its content; None if they read none."""
        return next(iter({**self.policy.profile_digests, **self.allocator.profile_digests}.items()), None)

    @property
    def uniform(self) -> bool:
        """Whether all layers, rows and heads hold equally many tokens."""
        return isinstance(self.allocator, Uniform)

    # ---- attention ------------------------------------------------------------------------------------------------

    @property
    def needs_our_attention(self) -> bool:
        """Whether the model must use the attention implementation "paged_eviction"."""
        return self.policy.needs.queries or not self.uniform or self.disposal.needs_queries

    def check_attention(self, attention: ModelAttention) -> None:
        """Refuse an attention implementation that would give wrong results, or that does not support the options.

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
            reason = f"With the allocator {self.allocator.label!r} layers or heads hold different numbers, and only"
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

    # ---- other spans, another budget ------------------------------------------------------------------------------

    def protecting(self, protect: object, present: int | None) -> "CheckedOptions":
        """The same options with other spans.

        Args:
            protect: see `CacheOptions`.
            present: the present budget in tokens, if it is known.

        Raises:
            TypeError, ValueError: see `BlockBudget.validate`, or the budget is too small for the spans.
        """
        sizes = self.sizes if present is None else self.sizes.of(present)
        protecting = sizes.protecting(protect)
        self._check_spans(protecting)
        if protecting.tokens is not None:
            self.check_disposal(protecting)
        return replace(self, sizes=replace(self.sizes, spans=protecting.spans))

    def shrunk(self, budget: int, present: int | None) -> "CheckedOptions":
        """The same options with a smaller budget.

        Args:
            budget: number of tokens.
            present: the present budget, if it is known.

        Raises:
            TypeError, ValueError: the budget is not valid, or larger than the present one.
        """
        sizes = self.sizes.resized(budget)
        self.check_disposal(sizes)
        if present is not None and sizes.capacity > present:
            raise ValueError(
                f"shrink({sizes.capacity}) would be growth: the budget is {present}, and evicted tokens cannot come "
                "back. Make a new cache."
            )
        return replace(self, sizes=sizes)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def settings(self, present: int | None = None) -> dict[str, Any]:
        """The options of the cache as JSON.

        Args:
            present: the present budget in tokens, if it is known.

        Raises:
            ValueError: the precision cannot be saved.
        """
        sizes = self.sizes if present is None or self.sizes.tokens is not None else self.sizes.in_tokens(present)
        cache_options = CacheOptions(
            budget=self.sizes.text,
            block_size=self.sizes.block_size,
            policy=self.policy.label,
            heads=self.heads,
            sink_tokens=sizes.protected,
            recent_tokens=sizes.recent,
            protect=self.sizes.spans or None,
            allocator=self.allocator.label,
            profile=None if self.profile is None else self.profile[0],
            disposal=self.disposal.label,
            positions=self.positions,
            bits=None if self.precision is None else self.precision.saved,
            static=self.static,
        )
        return dict(vars(cache_options))
