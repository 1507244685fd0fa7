"""The division of a cache's budget among its layers and their KV heads."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries
from ..saved import LONGEST, SavedState, StateDict
from ..table.budget import BlockBudget
from ..table.spans import Spans


class BudgetSplit:
    """Divides the budget of one cache among its layers. This base class gives every layer the mean.

    Attributes:
        unequal: whether rows or heads may have different budgets. The storage then fits the largest, and slots beyond a
            smaller budget are dead. Every forward of several tokens decides anew.
        among_layers: whether the tokens of one layer change the budgets of others. Then this object has a state.
        decides: whether shares depend on the attention of the layers, see `decide`.
        foresees: whether rows get new shares when single tokens have filled them, see `foresee`.
        compares: whether the tokens of all layers are compared with each other. A layer then rounds its scores once,
            and calls `add_ranks` with the tokens that it could keep before it calls `max_tokens`.
        layers: number of layers so far.
        mean: mean budget of a layer, or of a head; a budget in bytes is not known in tokens before the first forward.

    Args:
        mean: see above.
    """

    unequal = among_layers = decides = foresees = compares = False

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

    def max_tokens(self, layer: "LayerBudget", pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """`[B, S]` budget of each set in tokens from now on; None = the same for all.

        Args:
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
            min_tokens: `[B]` smallest budget of each set, in whole blocks.
        """
        return None

    def decide(
        self,
        layer: "LayerBudget",
        held: int,
        local_heads: LocalHeads,
        queries: Queries,
        key_positions: Tensor,
        query_positions: Tensor,
    ) -> bool:
        """Divide the budget anew after a layer with `held` tokens has attended, if the split `decides`.

        Returns whether the other layers have to evict down to their new budgets now. If shares were known beforehand,
        each layer does so when its own tokens come.

        Args:
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        return False

    def foresee(self, layer: "LayerBudget", filled: Tensor, seen: int) -> Tensor | None:
        """Decide new shares for the rows `[B]` bool that single tokens have filled, after `seen` columns. Returns the
        rows with new shares; None = none."""
        return None

    def has_ranks(self, layer: "LayerBudget") -> bool:
        """Whether `add_ranks` got the present tokens of the layer, or does not need them."""
        return True

    def add_ranks(self, layer: "LayerBudget", ranks: Tensor, min_tokens: Tensor) -> None:
        """Take the ranks of the tokens that a layer could keep, if the split `compares`.

        Args:
            ranks: `[B, S, tokens]` int64, see `KeptTokens`; `KEEP` for protected tokens, `DROP` for none.
            min_tokens: `[B]` smallest budget of each set in tokens, even if the set has fewer tokens.
        """

    def exceeds(self, layer: "LayerBudget", new: int) -> bool:
        """Whether the other layers must evict now, because this one took in `new` tokens in each head."""
        return False

    def forget(self, place: int) -> None:
        """Forget what is known of the layer at this place."""

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def begin(self, mean: BlockBudget) -> None:
        """Begin a text: no shares yet, and the mean is known in tokens."""
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
        """The present shares."""
        return {"shares": self._tokens}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """Restore the shares of another cache.

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
        scores: `[B, S, held]` scores of the held tokens, computed in the present forward before anything was evicted;
            None = not computed. Use them again if another layer's prompt changes the budget of this one: a score may
            depend on neighbours that were evicted since.

    Args:
        mean, split: see above; None = the layer alone.
    """

    def __init__(self, mean: BlockBudget, split: BudgetSplit | None = None) -> None:
        self.mean = self.now = mean
        self.split = split or BudgetSplit(mean)
        self.place = self.split.add()
        self.scores: Tensor | None = None

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
        """Forget the tokens of the layer."""
        self.now, self.scores = self.mean, None
        self.split.forget(self.place)


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
