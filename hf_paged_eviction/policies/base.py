"""What a policy is given and what it must return."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attention.weights import Attention
from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from ..naming import Named
from .needs import Needs

#: Statistics of one layer, by name.
Statistics = dict[str, Tensor]
#: Fields of `Needs` that a policy class must not have itself. Many policies have a parameter `window`.
_STATED = {field.name for field in fields(Needs)} - {"window"}


@dataclass(frozen=True)
class QueryCount:
    """Counts the observed queries. All fields are `[batch]` int64.

    Attributes:
        until: number of real tokens whose queries have been observed.
        since: number of real tokens whose own queries do not count, because their statistics were cleared.
        passing: number of queries that are not part of the text (those of a probe). They count for the first `since`
            tokens.
    """

    until: Tensor
    since: Tensor
    passing: Tensor

    def of(self, positions: Tensor) -> Tensor:
        """The number of queries that could see the tokens at `positions` `[batch, heads, tokens]`, float32."""
        until, since, passing = (numbers[:, None, None] for numbers in (self.until, self.since, self.passing))
        return (until - positions.maximum(since)).clamp_min(0).float() + passing * (positions < since)


@dataclass(frozen=True)
class ScoreContext:
    """The tokens of one layer that `score` is called for.

    Attributes:
        keys: `[batch, kv_heads, tokens, head_dim]`, as cached (after rotary embedding), in the model's dtype.
        values: `[batch, kv_heads, tokens, value_dim]`.
        positions: `[batch, kv_heads, tokens]` int64. 0 is the first real token of the row; -1 marks a pad, whose score
            is ignored.
        seen: `[batch]` int64, number of real tokens that the row has seen.
        layer_idx: index of the layer in the model.
        statistics: what `observe` returned, float32: `[batch, kv_heads, tokens]` for the names in
            `Needs.token_statistics` (zero before anything was observed), `[batch, ...]` for those in
            `Needs.row_statistics` (missing before anything was observed).
        observed: number of observed queries per row; None if the policy does not observe.
        local_heads: which of the layer's KV heads these are, see `all_heads`.
        budget: number of tokens that the layer may hold per KV head; 0 if it is not known; int64 `[batch, 1, 1]` if an
            allocator gives rows different budgets. If an allocator gives heads different budgets, their mean.
        rotary: the layer's rotation, for policies with `Needs.rotary`; None if the layer does not rotate its keys.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    layer_idx: int
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    observed: QueryCount | None = None
    local_heads: LocalHeads = WHOLE
    budget: int | Tensor = 0
    rotary: Rotary | None = None

    @property
    def queries(self) -> Tensor:
        """`[batch, kv_heads, tokens]` float32, number of observed queries that could see the token.

        All queries since the token arrived count, including those outside the policy's `window`. Queries that `crop`
        took back do not count, although their attention may be in the statistics.
        """
        if self.observed is None:
            return torch.zeros(self.positions.shape, device=self.positions.device)
        return self.observed.of(self.positions)

    @property
    def unrotated_keys(self) -> Tensor:
        """`[batch, kv_heads, tokens, head_dim]`, float32 or wider, before rotary embedding. Pads may hold anything."""
        if self.rotary is None:
            return self.keys.to(torch.promote_types(self.keys.dtype, torch.float32))
        return self.rotary.unrotate(self.keys, self.positions)

    def all_heads(self, numbers: Tensor) -> Tensor:
        """Collect numbers of all KV heads of the layer, for scores that compare heads.

        Under tensor parallelism a process holds some heads only; this adds the numbers of the others.

        Args:
            numbers: `[batch, kv_heads, ...]`, of the heads in this context.

        Returns:
            `[batch, all KV heads, ...]`.
        """
        return self.local_heads.gather(numbers)

    @property
    def first_head(self) -> int:
        """Index in the layer of the first KV head of this context; not 0 if other processes hold earlier heads."""
        return self.local_heads.first_head(self.keys.shape[1])

    @property
    def valid(self) -> Tensor:
        """`[batch, kv_heads, tokens]` bool, False for pads."""
        return self.positions >= 0


class EvictionPolicy(Named, ABC):
    """Scores tokens. The cache averages over heads and blocks, protects tokens and breaks ties.

    A policy holds parameters only, so one object may serve many caches. The cache stores what the policy remembers of
    queries and attention, its *statistics*: they move with the tokens, follow beams, and `reset` clears them.

    Class attributes:
        name: set by `register_policy`.
        paper: arXiv id, or None.
        needs: what the policy needs from the cache, see `Needs`; a property if it depends on parameters.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in sorted(_STATED & vars(cls).keys()):
            raise TypeError(
                f"{cls.__name__} says {name} where nobody looks. What a policy needs is said in one attribute: "
                f"`needs = Needs({name}=...)`, or a property of that name."
            )
        needs = vars(cls).get("needs", Needs())
        if not isinstance(needs, Needs | property | cached_property):
            raise TypeError(f"{cls.__name__}.needs must be a Needs object, or a property that returns one: {needs!r}.")

    @property
    def needs(self) -> Needs:
        """What the policy needs from the cache, see `Needs`."""
        return Needs()

    def check_model(self, config: Any) -> None:
        """Check that this policy can serve a model. Called once, when a cache is made.

        Args:
            config: `model.config`.

        Raises:
            ValueError: it cannot; the message gives the reason and what to use instead.
        """

    @abstractmethod
    def score(self, context: ScoreContext) -> Tensor:
        """Return `[batch, kv_heads, tokens]`, float32, high = keep. `inf` pins a token, nan counts as lowest."""

    # ---- for policies that decide by queries or attention ---------------------------------------------------------

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        """Update the statistics with the attention of some queries.

        Called with consecutive queries, in order: those of the block that has just been filled, or those of a forward
        of several tokens (the last `Needs.window` of them), in several calls if there are many.

        Args:
            statistics: what the last call returned. A name in `Needs.row_statistics` is missing in the first call.
            attention: the queries, the tokens they see, and the attention weights, which are computed on first access.

        Returns:
            New tensors for the same names, float32.
        """
        raise NotImplementedError(f"{type(self).__name__} names statistics but has no observe().")
