"""Made-up tokens for a policy to score: the rows of a batch, their queries, and the same in other guises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.weights import Attention, Logits
from ...integration.rotary import Rotary
from ...policies import EvictionPolicy, QueryCount, ScoreContext, Statistics

#: Query heads that share a KV head.
GROUP = 2
_TENSORS = ("keys", "values", "queries", "positions")
#: What the layer may hold.
BUDGET = 24
#: Of the channels of a key, 0 turns with 2 and 1 with 3; the others stay.
_ROTARY = Rotary(
    torch.tensor([0.7, 0.05, 0.7, 0.05]),
    torch.tensor([2, 3, 0, 1]),
    torch.tensor([-1.0, -1.0, 1.0, 1.0]),
    torch.ones(4),
)


@dataclass(frozen=True)
class NotingContext(ScoreContext):
    """Notes what it was asked for that a policy has to need."""

    asked: set[str] = field(default_factory=set)

    @property
    def unrotated_keys(self) -> Tensor:
        """See `ScoreContext`."""
        self.asked.add("rotary")
        return super().unrotated_keys


@dataclass
class NotingAttention(Attention):
    """Notes what it was asked for that a policy has to need."""

    asked: set[str] = field(default_factory=set)

    @property
    def unrotated_queries(self) -> Tensor:
        """See `Attention`."""
        self.asked.add("rotary")
        return super().unrotated_queries

    @property
    def weights(self) -> Tensor:
        """See `Attention`."""
        self.asked.add("weights")
        return super().weights


@dataclass(frozen=True)
class PolicyText:
    """Tokens of one layer, and a query for each.

    Attributes:
        keys, values: `[batch, kv_heads, tokens, dim]`.
        queries: `[batch, GROUP * kv_heads, tokens, dim]`, in the order of the text.
        positions: `[batch, kv_heads, tokens]`, -1 for a pad. Pads come first in the order of the text.
        layer_idx, budget: as `ScoreContext` has them.
        asked: what contexts and attention were asked for.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    layer_idx: int = 1
    budget: int = BUDGET
    asked: set[str] = field(default_factory=set)

    @classmethod
    def random(
        cls,
        dims: tuple[int, int],
        pads: Sequence[int] = (0, 3, 8),
        heads: int = 2,
        tokens: int = 40,
        kinds: int = 0,
        size: float = 1.0,
    ) -> "PolicyText":
        """Random states; row `r` starts with `pads[r]` pads, whose states are large.

        Args:
            dims: of keys and of values.
            kinds: so many different tokens there are, again and again; 0 = no two are alike.
            size: of keys and values.
        """
        rows, generator = len(pads), torch.Generator().manual_seed(0)
        which = torch.arange(tokens) if kinds == 0 else torch.randint(kinds, (tokens,), generator=generator)

        def states(count: int, dim: int) -> Tensor:
            return torch.randn(rows, count, tokens, dim, generator=generator)[:, :, which]

        keys = (states(heads, dims[0]) + torch.randn(dims[0], generator=generator)) * size
        values, queries = states(heads, dims[1]) * size, states(GROUP * heads, dims[0]) * 2
        positions = (torch.arange(tokens) - torch.tensor(pads)[:, None]).clamp_min(-1)[:, None].expand(-1, heads, -1)
        empty = (positions < 0)[..., None]
        return cls(keys.masked_fill(empty, 1e4), values.masked_fill(empty, -1e4), queries, positions.contiguous())

    # ---- the same in other guises -------------------------------------------------------------------------------

    def row(self, row: int) -> "PolicyText":
        """One row, alone and without its pads."""
        real = self.positions[row, 0] >= 0
        return self._each(lambda part: part[row : row + 1, :, real])

    def newest(self, count: int) -> "PolicyText":
        """The last tokens alone."""
        return self._each(lambda part: part[:, :, -count:])

    def shuffled(self) -> "PolicyText":
        """The same tokens in other slots, of each row and head on its own."""
        order = torch.rand(self.positions.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
        keys, values = (part.gather(2, order[..., None].expand_as(part)) for part in (self.keys, self.values))
        return replace(self, keys=keys, values=values, positions=self.positions.gather(2, order))

    def to(self, to: Any) -> "PolicyText":
        """States in another dtype, or everything on another device."""
        return self._each(lambda part: part if isinstance(to, torch.dtype) and part is self.positions else part.to(to))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "PolicyText":
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return replace(self, **changed)

    def in_order(self, scores: Tensor) -> Tensor:
        """Scores in the order of the text, `[batch, kv_heads, tokens]`."""
        return scores.gather(-1, self.positions.argsort(dim=-1, stable=True))

    # ---- what a policy is given ---------------------------------------------------------------------------------

    @property
    def query_positions(self) -> Tensor:
        """`[batch, tokens]`, in the order of the text."""
        return self.positions[:, 0].sort(dim=-1).values

    def attention(self, columns: Sequence[int], rotary: bool) -> NotingAttention:
        """Of these queries."""
        index = torch.tensor(columns, device=self.positions.device)
        return NotingAttention(
            self.queries[:, :, index],
            self.keys,
            self.query_positions[:, index],
            self.positions,
            Logits(0.4),
            rotary=_ROTARY if rotary else None,
            asked=self.asked,
        )

    def columns(self, policy: EvictionPolicy) -> list[int]:
        """The queries that the cache shows of a whole prompt."""
        tokens, window = self.positions.shape[-1], policy.needs.window
        return list(range(0 if window is None else max(0, tokens - window), tokens))

    def no_statistics(self, policy: EvictionPolicy) -> Statistics:
        """Before anything was observed."""
        shape, device = self.positions.shape, self.positions.device
        return {name: torch.zeros(shape, device=device) for name in policy.needs.token_statistics}

    def observed(self, policy: EvictionPolicy, pieces: Sequence[Sequence[int]]) -> Statistics:
        """The policy's statistics after these pieces of the queries."""
        found = self.no_statistics(policy)
        for columns in pieces if policy.needs.queries else ():
            found = policy.observe(found, self.attention(columns, policy.needs.rotary))
        return found

    def context(self, policy: EvictionPolicy, statistics: Statistics, observed: bool = True) -> NotingContext:
        """What is to be scored."""
        seen = self.positions[:, 0].amax(-1) + 1
        none = torch.zeros_like(seen)
        return NotingContext(
            self.keys,
            self.values,
            self.positions,
            seen,
            self.layer_idx,
            statistics,
            observed=QueryCount(seen if observed else none, none, none) if policy.needs.queries else None,
            budget=self.budget,
            rotary=_ROTARY if policy.needs.rotary else None,
            marks=self._marks if policy.needs.marks else None,
            asked=self.asked,
        )

    @property
    def _marks(self) -> Tensor:
        """What the policy might have been told of these tokens: some number of each value."""
        return self.values.float().nan_to_num().abs().mean(-1).clamp(1e-3, 1e3)

    def scores(self, policy: EvictionPolicy, pieces: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The policy's scores once it has observed these pieces, or the whole prompt."""
        pieces = [self.columns(policy)] if pieces is None else pieces
        return policy.score(self.context(policy, self.observed(policy, pieces)))
