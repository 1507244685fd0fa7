"""What every request is given, whichever server serves it."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..allocators import FixedAllocator
from ..cache import PagedEvictionCache
from ..layer.paged import PagedLayer
from ..options.cache_options import CacheOptions
from ..policies import EvictionPolicy
from ..queries.attention import shown_queries
from ..table.budget import BlockBudget, whole_number
from ..table.spans import Spans, read_spans


@dataclass(frozen=True)
class Setup:
    """Budget, policy and allocator of the requests of a server.

    Attributes:
        sizes: budget and protected tokens of each request and layer.
        policy: the policy.
        allocator: divides the budget among layers and KV heads.
        layers: the layers that evict, by index in the model; they score tokens and hold none.
        alone: makes the cache of one request, for a budget.
        server: who serves, at the beginning of a sentence.
        unserved: options of a cache that it does not support, with the reasons.
    """

    server: ClassVar[str]
    unserved: ClassVar[Mapping[str, str]]

    sizes: BlockBudget
    policy: EvictionPolicy
    allocator: FixedAllocator
    layers: dict[int, PagedLayer]
    alone: Callable[[int], PagedEvictionCache]
    _sizes: dict[int, BlockBudget] = field(default_factory=dict, kw_only=True)

    @classmethod
    def fields_for(cls, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check the options of a cache, as `PagedEvictionCache` does, and return the fields that follow from them.

        Args:
            config: the model's configuration.
            options: unsupported ones must have their defaults.

        Raises:
            TypeError, ValueError: an option is not valid or not supported; the message says what to do instead.
        """
        user_options = CacheOptions(**options)
        if user_options.budget is None:
            raise ValueError("budget= (tokens held per request and layer) is needed: memory is reserved for it.")
        cls._refuse(user_options)

        def of_budget(budget: int) -> PagedEvictionCache:
            return _alone(config, {**options, "budget": budget})

        alone = of_budget(user_options.budget)  # type: ignore[arg-type]
        cls._refuse_policy(alone.policy)
        allocator = alone.allocator
        if not isinstance(allocator, FixedAllocator):
            raise ValueError(
                f"The allocator {allocator.name!r} decides by each prompt how many tokens a layer or head may hold, "
                f"while the prompt is read. {cls.server} must know it before: use allocator='heads:PROFILE' "
                "(paged-eviction prepare), 'pyramid' or 'uniform', or PagedEvictionCache with generate."
            )
        layers = dict(alone.paged_layers)
        if not layers:
            raise ValueError(
                f"No layer of this {config.model_type} model can evict: all hold a fixed number of tokens already. "
                f"Serve it without a budget."
            )
        sizes = next(iter(layers.values())).budget
        return {"sizes": sizes, "policy": alone.policy, "allocator": allocator, "layers": layers, "alone": of_budget}

    @classmethod
    def _refuse(cls, options: CacheOptions) -> None:
        budget, usually = options.budget, vars(CacheOptions())
        if isinstance(budget, str) and not budget.strip().isdecimal():
            raise ValueError(
                f"{cls.server} does not support budget={budget!r}: memory is reserved by tokens, before a prompt is "
                "read. Give budget= as a number of tokens; `paged-eviction plan` says how many a number of bytes holds."
            )
        if options.positions == "cache":
            raise ValueError(
                f'{cls.server} does not support positions="cache": pages hold keys rotated to their positions in the '
                'text. Use positions="text" and keep prompt and answer together within the model\'s window, or use '
                'PagedEvictionCache(..., positions="cache") with generate.'
            )
        if options.positions != "text":
            raise ValueError(f'positions must be "text", got {options.positions!r}.')
        for name, reason in cls.unserved.items():
            value, usual = getattr(options, name), usually[name]
            if value is not usual and value != usual:
                raise ValueError(
                    f"{cls.server} does not support {name}={value!r}: {reason}. Leave {name}= out, or use "
                    f"PagedEvictionCache(..., {name}=...) with generate."
                )

    @classmethod
    def _refuse_policy(cls, policy: EvictionPolicy) -> None:
        needs, reason = policy.needs, None
        if needs.by_probe:
            reason = f"runs queries of its own after each prompt. {cls.server} does not"
        elif needs.decision_interval > 1:
            reason = f"evicts every {needs.decision_interval} tokens. {cls.server} evicts one block at a time"
        if reason is not None:
            raise ValueError(
                f"The policy {policy.label!r} {reason}. Use another one, such as 'keydiff', 'snapkv' or "
                "'calibrated:FILE', or PagedEvictionCache with generate."
            )

    @property
    def budget(self) -> int:
        """Number of tokens held per request and layer."""
        return self.sizes.capacity

    @property
    def separate(self) -> bool:
        """Whether each KV head evicts its own tokens."""
        return next(iter(self.layers.values())).heads == "separate"

    def sizes_of(self, budget: int | None) -> BlockBudget:
        """The sizes of a request with its own budget; None = the common budget.

        Raises:
            TypeError, ValueError: the budget is not valid, or exceeds the common budget.
        """
        if budget is None or budget == self.budget:
            return self.sizes
        if budget not in self._sizes:
            self._sizes[budget] = self._checked(budget)
        return self._sizes[budget]

    def _checked(self, budget: int) -> BlockBudget:
        if whole_number("budget", budget, 1) > self.budget:
            raise ValueError(
                f"budget={budget} is more than {self.budget}, the budget of this server. Ask for at most "
                f"{self.budget} tokens, or leave budget= out."
            )
        alone = self.alone(budget)
        if (alone.policy, alone.allocator.label) != (self.policy, self.allocator.label):
            raise ValueError(
                f"budget={budget} is too small for {self.policy.label} with {self.allocator.label}. Ask for more "
                "tokens, or leave budget= out."
            )
        return next(iter(dict(alone.paged_layers).values())).state.budget.mean

    def spans_of(self, protect: Any, budget: int | None = None, seen: int = 0, before: Spans = ()) -> Spans:
        """The protected spans of a request, its start included.

        Args:
            protect: its own spans.
            budget: its own budget, if it has one.
            seen, before: number of tokens before these that `protect` counts, and their spans.

        Raises:
            TypeError, ValueError: the spans are not valid, or the budget is not valid or too small for them.
        """
        rows = read_spans(protect)
        if len(rows) > 1:
            raise TypeError(f"protect= has spans for {len(rows)} rows; a request is one: give pairs (start, end).")
        own = [(seen + start, seen + end) for row in rows for start, end in row]
        sizes = self.sizes_of(budget).protecting([*before, *own] if own else None)
        return self.sizes.start_and(sizes.spans[0] if own else before)


def _alone(config: Any, options: dict[str, Any]) -> PagedEvictionCache:
    """What a request is given alone; an allocator that nobody asked for is one that is served."""
    with warnings.catch_warnings(), shown_queries(config):
        warnings.simplefilter("ignore")  # these warnings are about `generate`
        cache = PagedEvictionCache(config, **options)
        if options.get("allocator") is None and not isinstance(cache.allocator, FixedAllocator):
            cache = PagedEvictionCache(config, **options | {"allocator": "uniform"})
        return cache
