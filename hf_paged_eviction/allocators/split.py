"""The division of a cache's budget among its layers and their KV heads."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries
from ..table.budget import BlockBudget
from ..table.spans import Spans
from ..tensors.saved import LONGEST, SavedState, StateDict


class BudgetSplit:
    """Divides the budget of one cache among its layers. This base class gives every layer the mean.

    Budgets change between forwards only: when a forward of several tokens does not fit, when single tokens have filled
    a row, and in `shrink` and `protect`. Single tokens after that evict within each set.

    Attributes:
        unequal: whether rows or heads may have different budgets. The storage then fits the largest, and slots beyond a
            smaller budget are dead.
        settles: whether budgets depend on what all layers bring. The new tokens of a forward that does not fit then
            wait until the last layer has attended: each layer calls `attend` or `rank`, and `settle` and `max_tokens`
            follow.
        compares: whether the scores of all layers are compared with each other. A layer then rounds them once.
        foresees: whether rows get new budgets when single tokens have filled them, see `foresee`.
        has_state: whether the budgets have to be saved with the cache.
        layers: number of layers so far.
        mean: mean budget of a layer, or of a head; a budget in bytes is not known in tokens before the first forward.

    Args:
        mean: see above.
    """

    unequal = settles = compares = foresees = has_state = False

    def __init__(self, mean: BlockBudget) -> None:
        self.layers = 0
        self._asked = self.mean = mean
        self._tokens: dict[int, Tensor] = {}  # by place, [B, sets]

    def add(self) -> int:
        """Add the next layer of the model; returns its place."""
        self.layers += 1
        return self.layers - 1

    def tokens(self, place: int) -> Tensor | None:
        """`[B, sets]` budget in tokens of the layer at this place; None before the first decision."""
        return self._tokens.get(place)

    # ---- what layers ask ------------------------------------------------------------------------------------------

    def check(self, layer: "LayerBudget", kv_heads: int, local_heads: LocalHeads) -> None:
        """Check that the layer's number of heads, and the processes that hold them, fit this split.

        Raises:
            ValueError: with the way out.
        """

    def for_policy(self, layer: "LayerBudget") -> int | Tensor:
        """See `LayerBudget.for_policy`."""
        return layer.mean.tokens or layer.now.capacity

    def divide(self, layer: "LayerBudget", real: Tensor) -> None:
        """A layer is about to choose among more tokens than fit, of rows that have seen `real` `[B]` tokens: decide
        what depends on nothing else."""

    @property
    def waits(self) -> bool:
        """Whether the next forward of several tokens that does not fit has to be settled."""
        return self.settles

    def attend(
        self,
        layer: "LayerBudget",
        local_heads: LocalHeads,
        queries: Queries,
        key_positions: Tensor,
        query_positions: Tensor,
    ) -> None:
        """Take the attention of a layer, before `settle`.

        Args:
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """

    def rank(self, layer: "LayerBudget", ranks: Tensor, min_tokens: Tensor) -> None:
        """Take the ranks of the tokens that a layer could keep, before `settle`, if the split `compares`.

        Args:
            ranks: `[B, S, tokens]` int64, see `KeptTokens`; `KEEP` for protected tokens, `DROP` for none.
            min_tokens: `[B]` smallest budget of each set in tokens, even if the set has fewer tokens.
        """

    def settle(self, real: Tensor) -> None:
        """Decide, after all layers have called `attend` or `rank`; `real` as in `divide`."""

    def divide_anew(self, real: Tensor) -> None:
        """Decide about the held tokens, after `shrink` or `protect`, and `rank` of all layers."""

    def max_tokens(self, layer: "LayerBudget", pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """`[B, S]` budget of each set in tokens from now on; None = the same for all.

        Args:
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
            min_tokens: `[B]` smallest budget of each set, in whole blocks.
        """
        return None

    def foresee(self, layer: "LayerBudget", filled: Tensor, seen: int) -> Tensor | None:
        """Decide new budgets for the rows `[B]` bool that single tokens have filled, after `seen` columns. Returns the
        rows with new budgets; None = none."""
        return None

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def begin(self, mean: BlockBudget) -> None:
        """Begin a text: no budgets yet, and the mean is known in tokens."""
        self.mean = mean

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Protect other spans from now on. The layers change when their `protect` is called."""
        self._asked, self.mean = replace(self._asked, spans=spans), replace(self.mean, spans=spans)

    def shrink(self, mean: BlockBudget) -> None:
        """Set another mean. The layers change when their `shrink` is called."""
        self._asked = self.mean = mean

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        self._tokens = {place: change(tokens) for place, tokens in self._tokens.items()}

    def clear(self) -> None:
        """Forget the prompt."""
        self.mean, self._tokens = self._asked, {}

    def state_dict(self) -> StateDict:
        """The present budgets."""
        return {"shares": self._tokens}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """Restore the budgets of another cache.

        Raises:
            ValueError: the state does not fit.
        """
        shares, size = saved.part("shares"), self.mean.block_size
        for place in range(self.layers):
            if shares.has(str(place)):
                self._tokens[place] = shares.tensor(str(place), (rows, None), torch.int64, size, LONGEST)
        if self._tokens and self.mean.tokens is None:  # it was given in bytes, or as a share
            total = sum(int(tokens[0].sum()) for tokens in self._tokens.values())
            self.begin(self.mean.of(self._mean(total, sum(tokens.shape[1] for tokens in self._tokens.values()))))

    def _mean(self, total: int, sets: int) -> int:
        """The mean, given all tokens of a row in so many sets."""
        return total // sets


class LayerBudget:
    """The budget of one layer: the same in every row and head, unless its split says otherwise.

    Attributes:
        mean: budget of the layer; a mean if rows or heads have different budgets.
        now: the present budget of the longest row and head. A budget in bytes, or as a share of the prompt, becomes a
            number of tokens at the first forward.
        split: divides the budget of the cache.
        place: index of the layer in the split.

    Args:
        mean, split: see above; None = the layer alone.
    """

    def __init__(self, mean: BlockBudget, split: BudgetSplit | None = None) -> None:
        self.mean = self.now = mean
        self.split = split or BudgetSplit(mean)
        self.place = self.split.add()

    @property
    def for_policy(self) -> int | Tensor:
        """The budget that policies see, see `ScoreContext.budget`."""
        return self.split.for_policy(self)

    def give(self, mean: BlockBudget) -> None:
        """Set another budget."""
        self.mean = self.now = mean

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Protect other spans from now on, see `BlockBudget`."""
        self.mean, self.now = replace(self.mean, spans=spans), replace(self.now, spans=spans)

    def resize(self, tokens: int) -> None:
        """Set the present budget of the longest row and head."""
        self.now = self.now.of(tokens)

    def clear(self) -> None:
        """Forget the tokens of all layers."""
        self.now = self.mean
        self.split.clear()


def refuse_processes(name: str, among: str, kv_heads: int, local_heads: LocalHeads) -> None:
    """Refuse tensor parallelism for an allocator that compares the KV heads of a layer, or of all layers (`among`).

    Raises:
        ValueError: with the way out.
    """
    if local_heads.processes(kv_heads) > 1:
        raise ValueError(
            f"The allocator {name!r} compares all KV heads of {among}, and tensor parallelism gave some to other "
            "processes, which would have to make room for what is decided here. Use allocator='uniform' or one that "
            "shares out among layers, or keep the model in one process."
        )
