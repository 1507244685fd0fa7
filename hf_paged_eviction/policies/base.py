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

#: Running numbers of one layer, by name.
Statistics = dict[str, Tensor]
#: What only `Needs` can say; `window` is a parameter of many policies, too.
_STATED = {each.name for each in fields(Needs)} - {"window"}


@dataclass(frozen=True)
class QueryCount:
    """How many queries have been observed, in numbers per row: `[batch]` int64.

    Attributes:
        until: real tokens whose queries have been observed.
        since: real tokens whose own queries do not count, because they were forgotten.
        passing: queries that met those tokens since then and were no part of the text (a probe).
    """

    until: Tensor
    since: Tensor
    passing: Tensor

    def of(self, positions: Tensor) -> Tensor:
        """Those that could see the tokens at `positions` `[batch, heads, tokens]`, float32."""
        until, since, passing = (numbers[:, None, None] for numbers in (self.until, self.since, self.passing))
        return (until - positions.maximum(since)).clamp_min(0).float() + passing * (positions < since)


@dataclass(frozen=True)
class ScoreContext:
    """The tokens of one layer that are to be scored.

    Attributes:
        keys: `[batch, kv_heads, tokens, head_dim]`, as cached (after rotary embedding), in the model's dtype.
        values: `[batch, kv_heads, tokens, value_dim]`.
        positions: `[batch, kv_heads, tokens]` int64. 0 is the first real token of the row; -1 marks a pad, whose
            score is ignored.
        seen: `[batch]` int64, real tokens the row has seen so far.
        layer_idx: index of the layer in the model.
        statistics: what `observe` made of the attention so far, float32: `[batch, kv_heads, tokens]` for the names
            in `Needs.token_statistics`, `[batch, ...]` for those in `Needs.row_statistics`. Zero before anything was
            observed.
        observed: queries observed, by row; None where the policy observes nothing.
        local_heads: where the layer's other KV heads are, for `all_heads`.
        budget: tokens that the layer may hold per KV head, 0 where that is not known; int64 `[batch, 1, 1]` where an
            allocator decides it row by row. Under an allocator that shares out among heads: their mean.
        rotary: the layer's rotation, for policies that need it (`Needs.rotary`); None where the layer does not rotate
            its keys (absolute positions, layers without positions).
        marks: `[batch, kv_heads, tokens]` float32, what the policy was told of each token from outside when it came
            (`Needs.marks`); None for others.
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
    marks: Tensor | None = None

    @property
    def queries(self) -> Tensor:
        """`[batch, kv_heads, tokens]` float32, observed queries that could see the token.

        All of them since the token arrived; under a `window` those that it left out count too. Queries that were
        observed and then taken back by `crop` count for no token, though what they paid may be in the statistics.
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
        """Numbers of all KV heads of the layer `[batch, all, ...]`, from those of these heads `[batch, kv_heads, ...]`.

        For scores that compare heads: where the layer has more heads than are given here, these are added.
        """
        return self.local_heads.gather(numbers)

    @property
    def first_head(self) -> int:
        """Index in the layer of the first of these KV heads, where the layer has more of them."""
        return self.local_heads.first_head(self.keys.shape[1])

    @property
    def valid(self) -> Tensor:
        """`[batch, kv_heads, tokens]` bool, False for pads."""
        return self.positions >= 0


class EvictionPolicy(Named, ABC):
    """Scores tokens. Reduction over heads and blocks, protection and ties belong to the cache.

    A policy holds parameters only, never state of a run: one object may serve many caches. What it must remember of
    queries and attention are its *statistics*, which the cache keeps for it: they move with the tokens, follow beams
    and are forgotten by `reset`.

    Class attributes:
        name: set by `register_policy`.
        paper: arXiv id, or None.
        needs: what is kept for the policy, what it is shown, and how its scores are to be taken; a property where that
            depends on parameters. See `Needs`.
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
        """What is kept for the policy, what it is shown, and how its scores are to be taken."""
        return Needs()

    def check_model(self, config: Any) -> None:
        """Refuse a model that this policy was not made for; asked once, when a cache is made.

        Args:
            config: `model.config`.

        Raises:
            ValueError: with the reason and the way out.
        """

    def prepare_model(self, model: Any) -> None:
        """Make a model ready for caches of this policy, once: where it is told of tokens (`Needs.marks`), install what
        tells. Commands call it for every policy that they are given; a user of the library installs it himself.

        Raises:
            ValueError: the model cannot be used, with the reason and the way out.
        """

    @abstractmethod
    def score(self, context: ScoreContext) -> Tensor:
        """Return `[batch, kv_heads, tokens]`, float32, high = keep. `inf` pins a token, nan counts as lowest."""

    # ---- for policies that decide by queries or attention ---------------------------------------------------------

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        """Fold what some queries attend to into the statistics.

        Called with consecutive queries, in order: those of the block that has just been filled, or (some of) those
        of a forward of several tokens, in pieces where there are many.

        Args:
            statistics: as of the last call. A name in `Needs.row_statistics` is missing before the first one.
            attention: the queries, the tokens they see and (computed when asked for) the attention weights.

        Returns:
            New tensors for the same names, float32.
        """
        raise NotImplementedError(f"{type(self).__name__} names statistics but has no observe().")
