"""What every request is given, whichever server serves it."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from ..allocators import FixedAllocator
from ..cache import PagedEvictionCache
from ..options.cache_options import CacheOptions
from ..policies import EvictionPolicy
from ..queries.attention import shown_queries
from ..table.budget import BlockBudget, whole_number
from ..table.spans import Spans, read_spans


class Setup:
    """Budget, policy and allocator of the requests of a server.

    Attributes:
        sizes: budget and protected tokens of each request and layer.
        budget: number of tokens held per request and layer.
        policy: the policy.
        allocator: divides the budget among layers and KV heads.
        layers: the layers that evict, by index in the model; they score tokens and hold none.
        separate: whether each KV head evicts its own tokens.
        server: who serves, at the beginning of a sentence.
        unserved: options of a cache that it does not support, with the reasons.

    Args:
        config: the model's configuration.
        options: options of a cache; unsupported ones must have their defaults.

    Raises:
        TypeError, ValueError: an option is not valid or not supported; the message says what to do instead.
    """

    server: ClassVar[str]
    unserved: ClassVar[Mapping[str, str]]

    def __init__(self, config: Any, options: Mapping[str, Any]) -> None:
        self._config, self._options = config, options
        wanted = CacheOptions(**options)
        self._refuse(wanted)
        alone = self._alone(wanted.budget)
        self._refuse_policy(alone.policy)
        if not isinstance(alone.allocator, FixedAllocator):
            raise ValueError(
                f"The allocator {alone.allocator.name!r} decides by each prompt how many tokens a layer or head may "
                f"hold, while the prompt is read. {self.server} must know it before: use allocator='heads' "
                "with profile=FILE (paged-eviction prepare), 'pyramid' or 'uniform', or PagedEvictionCache with "
                "generate."
            )
        self.layers = dict(alone.paged_layers)
        if not self.layers:
            raise ValueError(
                f"No layer of this {config.model_type} model can evict: all hold a fixed number of tokens already. "
                f"Serve it without a budget."
            )
        first = next(iter(self.layers.values()))
        self.sizes: BlockBudget = first.budget
        self.budget, self.separate = self.sizes.capacity, first.heads == "separate"
        self.policy, self.allocator = alone.policy, alone.allocator
        self._sizes = {self.budget: self.sizes}

    def _alone(self, budget: Any) -> PagedEvictionCache:
        """What a request is given alone; an allocator that nobody asked for is one that is served."""
        options = {**self._options, "budget": budget}
        with warnings.catch_warnings(), shown_queries(self._config):
            warnings.simplefilter("ignore")  # these warnings are about `generate`
            cache = PagedEvictionCache(self._config, **options)
            if options.get("allocator") is None and not isinstance(cache.allocator, FixedAllocator):
                cache = PagedEvictionCache(self._config, **options | {"allocator": "uniform"})
            return cache

    def _refuse(self, options: CacheOptions) -> None:
        budget, usually = options.budget, vars(CacheOptions())
        if budget is None:
            raise ValueError("budget= (tokens held per request and layer) is needed: memory is reserved for it.")
        if isinstance(budget, str) and not budget.strip().isdecimal():
            raise ValueError(
                f"{self.server} does not support budget={budget!r}: memory is reserved by tokens, before a prompt is "
                "read. Give budget= as a number of tokens; `paged-eviction plan` says how many a number of bytes holds."
            )
        rotated = {"positions": "pages hold keys rotated to their positions in the text"}
        for name, reason in (rotated | dict(self.unserved)).items():
            value, usual = getattr(options, name), usually[name]
            if value is not usual and value != usual:
                raise ValueError(
                    f"{self.server} does not support {name}={value!r}: {reason}. Leave {name}= out, or use "
                    f"PagedEvictionCache(..., {name}=...) with generate."
                )

    def _refuse_policy(self, policy: EvictionPolicy) -> None:
        needs, reason = policy.needs, None
        if needs.by_probe:
            reason = f"runs queries of its own after each prompt. {self.server} does not"
        elif needs.decision_interval > 1:
            reason = f"evicts every {needs.decision_interval} tokens. {self.server} evicts one block at a time"
        if reason is not None:
            raise ValueError(
                f"The policy {policy.label!r} {reason}. Use another one, such as 'keydiff', 'snapkv' or "
                "'calibrated', or PagedEvictionCache with generate."
            )

    # ---- one request ----------------------------------------------------------------------------------------------

    def sizes_of(self, budget: int | None, context: Any = None) -> BlockBudget:
        """The sizes of a request with its own budget; None = the common budget, which contexts have.

        Raises:
            TypeError, ValueError: the budget is not valid, exceeds the common budget or differs from the context's.
        """
        if context is not None and budget not in (None, self.budget):
            raise ValueError(
                f"budget={budget}, but the context was read with a budget of {self.budget} tokens. Leave budget= out."
            )
        budget = self.budget if budget is None else whole_number("budget", budget, 1)
        if budget not in self._sizes:
            self._sizes[budget] = self._checked(budget)
        return self._sizes[budget]

    def _checked(self, budget: int) -> BlockBudget:
        if budget > self.budget:
            raise ValueError(
                f"budget={budget} is more than {self.budget}, the budget of this server. Ask for at most "
                f"{self.budget} tokens, or leave budget= out."
            )
        alone = self._alone(budget)
        if (alone.policy, alone.allocator.label) != (self.policy, self.allocator.label):
            raise ValueError(
                f"budget={budget} is too small for {self.policy.label} with {self.allocator.label}. Ask for more "
                "tokens, or leave budget= out."
            )
        return next(iter(dict(alone.paged_layers).values())).state.budget.mean

    def spans_of(self, protect: Any = None, budget: int | None = None, context: Any = None) -> Spans:
        """The protected spans of a request, its start and those of its context included.

        Args:
            protect: its own spans, of the tokens after the context.
            budget: its own budget, if it has one.
            context: what it continues from, with `seen` tokens and `spans`.

        Raises:
            TypeError, ValueError: the spans are not valid, or the budget is not valid or too small for them.
        """
        sizes, rows = self.sizes_of(budget, context), read_spans(protect)
        if len(rows) > 1:
            raise TypeError(f"protect= has spans for {len(rows)} rows; a request is one: give pairs (start, end).")
        seen, before = (0, ()) if context is None else (context.seen, context.spans)
        own = [(seen + start, seen + end) for row in rows for start, end in row]
        return self.sizes.start_and(sizes.protecting([*before, *own]).spans[0] if own else before)
