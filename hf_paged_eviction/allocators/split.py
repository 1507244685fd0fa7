"""How the budget of a cache is divided among its layers and their KV heads, and what each layer may hold."""

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
    """One object per cache, asked by its layers. This one gives every layer what it was given.

    Attributes:
        unequal: whether rows or heads may hold different numbers; the storage is as long as the largest, and slots
            beyond a smaller one are dead. Every forward of several tokens decides anew.
        among_layers: whether layers may hold more or less for what came to others. Then this object has a state.
        selects: whether tokens may leave although all would fit, so that every forward of several tokens decides.
        decides: whether shares follow from what each layer attends to, see `decide`.
        foresees: whether rows that single tokens fill get other shares then, see `foresee`.
        compares: whether the tokens of all layers are compared with each other. Then round scores once, and
            `add_ranks` of what a layer could keep before asking `max_tokens` how much of it stays.
        layers: how many there are so far.
        mean: budget of a layer, or of a head; of a budget in bytes not known before the first tokens.

    Args:
        mean: see above.
    """

    unequal = among_layers = selects = decides = foresees = compares = False

    def __init__(self, mean: BlockBudget) -> None:
        self.layers = 0
        self._asked = self.mean = mean
        self._tokens: dict[int, Tensor] = {}  # by place, [B, sets]

    def add(self) -> int:
        """One more layer, in the order of the model; returns its place."""
        self.layers += 1
        return self.layers - 1

    def tokens(self, place: int) -> Tensor | None:
        """`[B, sets]` tokens that the layer at this place may hold; None before anything was decided."""
        return self._tokens.get(place)

    # ---- what layers ask ------------------------------------------------------------------------------------------

    def check(self, layer: "LayerBudget", kv_heads: int, local_heads: LocalHeads) -> None:
        """Refuse heads that are of another number, or spread over processes, where that cannot be right.

        Raises:
            ValueError: with the way out.
        """

    def for_policy(self, layer: "LayerBudget") -> int | Tensor:
        """See `LayerBudget.for_policy`."""
        return layer.mean.tokens or layer.now.capacity

    def max_tokens(self, layer: "LayerBudget", pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """`[B, S]` tokens that each set may hold from now on; None = all the same.

        Args:
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
            min_tokens: `[B]` tokens that each set has to have room for, in whole blocks.
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
        """A layer that held so many tokens has attended: share out anew, where it `decides`.

        Returns whether the other layers have to fit what they may hold then, so that the total holds. Where shares were
        known beforehand, each fits when its own tokens come.

        Args:
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        return False

    def foresee(self, layer: "LayerBudget", filled: Tensor, seen: int) -> Tensor | None:
        """Single tokens have filled these rows `[B]` bool, after `seen` columns. Returns those that are shared out anew
        now; None = none."""
        return None

    def has_ranks(self, layer: "LayerBudget") -> bool:
        """Whether `add_ranks` was told what the layer holds as it is now, or need not be."""
        return True

    def add_ranks(self, layer: "LayerBudget", ranks: Tensor, min_tokens: Tensor) -> None:
        """What a layer could keep, where it `compares`.

        Args:
            ranks: `[B, S, tokens]` int64, see `KeptTokens`; `KEEP` for protected tokens, `DROP` for none.
            min_tokens: `[B]` tokens that each set has room for in any case, also where it does not have so many.
        """

    def exceeds(self, layer: "LayerBudget", new: int) -> bool:
        """Whether the other layers have to fit now, since this one took in so many `new` tokens in each head."""
        return False

    def forget(self, place: int) -> None:
        """The layer at this place begins anew."""

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def begin(self, mean: BlockBudget) -> None:
        """Nothing was shared out yet, and the mean is known."""
        self.mean = mean

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Other spans are protected from now on. The layers follow when they are told."""
        self._asked, self.mean = replace(self._asked, spans=spans), replace(self.mean, spans=spans)

    def shrink(self, mean: BlockBudget) -> None:
        """Another mean. The layers follow when they are asked to shrink."""
        self._asked = self.mean = mean

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        self._tokens = {place: change(tokens) for place, tokens in self._tokens.items()}

    def clear(self) -> None:
        """Forget the prompt."""
        self.mean, self._tokens = self._asked, {}

    def state_dict(self) -> StateDict:
        """What was decided."""
        return {"shares": self._tokens}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """Share out as another cache did.

        Raises:
            ValueError: it does not fit.
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
    """What one layer may hold: the same in every row and head, unless its split says otherwise.

    Attributes:
        mean: what the layer was given, on average where rows or heads hold different numbers.
        now: what it holds at most now, in its longest row and head. A budget in bytes, or as a share of the prompt,
            becomes a number of tokens at the first forward.
        split: divides the budget of the cache.
        place: of the layer among those that the split divides it among.
        scores: `[B, S, held]` of the tokens held, worked out in the present forward before anything was evicted; None =
            work them out. Use them again where another layer's prompt changes what this one may hold: a score may
            depend on neighbours that have left since.

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
        """Tokens that the layer may hold, as policies are told: see `ScoreContext.budget`."""
        return self.split.for_policy(self)

    def give(self, mean: BlockBudget) -> None:
        """Another budget from now on."""
        self.mean = self.now = mean

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Other spans are protected from now on, see `BlockBudget`."""
        self.mean, self.now = replace(self.mean, spans=spans), replace(self.now, spans=spans)

    def resize(self, tokens: int) -> None:
        """The longest row and head may hold so many now."""
        self.now = self.now.of(tokens)

    def clear(self) -> None:
        """The layer begins anew."""
        self.now, self.scores = self.mean, None
        self.split.forget(self.place)


def refuse_processes(name: str, among: str, kv_heads: int, local_heads: LocalHeads) -> None:
    """Refuse heads of other processes where an allocator compares all KV heads `among` a layer, or all.

    Raises:
        ValueError: with the way out.
    """
    if local_heads.processes(kv_heads) > 1:
        raise ValueError(
            f"The allocator {name!r} compares all KV heads of {among}, and tensor parallelism gave some to other "
            "processes, which would have to make room for what is decided here. Use allocator='uniform' or one that "
            "shares out among layers, or keep the model in one process."
        )
