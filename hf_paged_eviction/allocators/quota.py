"""How many tokens one layer may hold: as many as it was given, or a number of its own in each row or KV head."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .base import HeadAllocator
from .cascade import Cascade
from .share import share_out


class Quota:
    """As many as the layer was given, the same in every row and head.

    Attributes:
        asked: what the layer was given, on average where rows or heads hold different numbers.
        budget: what it holds at most now, in its longest row and head. A budget in bytes, or as a share of the prompt,
            becomes a number of tokens at the first forward.
        unequal: whether rows or heads may hold different numbers; the storage is as long as the largest, and slots
            beyond a smaller one are dead. Every forward of several tokens decides anew.
        selects: whether tokens may leave although all would fit, so that every forward of several tokens decides.
        decides: whether shares follow from what each layer attends to, see `decide`.
        foresees: whether rows that single tokens fill get other shares then, see `foresee`.
        common: whether the tokens of all layers are compared with each other. Then round scores once, and `offer` what
            a layer could keep before asking `limits` how much of it stays.
        scores: `[B, S, held]` of the tokens held, worked out in the present forward before anything was evicted; None =
            work them out. Use them again where another layer's prompt changes the limits of this one: a score may
            depend on neighbours that have left since.
    """

    unequal = False
    selects = False
    decides = False
    foresees = False
    common = False

    def __init__(self, asked: BlockBudget) -> None:
        self.asked = self.budget = asked
        self.scores: Tensor | None = None

    def ask(self, budget: BlockBudget) -> None:
        """Another budget from now on."""
        self.asked = self.budget = budget

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Other spans are protected from now on, see `BlockBudget`."""
        self.asked, self.budget = replace(self.asked, spans=spans), replace(self.budget, spans=spans)

    def resize(self, tokens: int) -> None:
        """The longest row and head may hold so many now."""
        self.budget = self.budget.of(tokens)

    def clear(self) -> None:
        """The layer begins anew."""
        self.budget = self.asked
        self.scores = None

    def check(self, kv_heads: int, local_heads: LocalHeads) -> None:
        """Refuse heads that are spread over processes, where that cannot be right.

        Raises:
            ValueError: with the way out.
        """

    def decide(
        self, held: int, local_heads: LocalHeads, queries: Queries, key_positions: Tensor, query_positions: Tensor
    ) -> bool:
        """The layer has attended, see `Cascade.attended`. Returns whether other layers may hold more or less now."""
        return False

    def foresee(self, filled: Tensor, seen: int) -> Tensor | None:
        """Single tokens have filled these rows `[B]` bool, after `seen` columns. Returns those that are shared out anew
        now; None = none."""
        return None

    @property
    def offered(self) -> bool:
        """Whether what the layer holds was offered as it is now, or need not be."""
        return True

    def offer(self, ranks: Tensor, least: Tensor) -> None:
        """What the layer could keep, where it is compared with other layers: `[B, S, tokens]`, see `KeptTokens`;
        `least` `[B]` tokens stay in each set."""

    def crowded(self, came: int) -> bool:
        """Whether the other layers have to fit now what was offered: `came` tokens were taken in by this one."""
        return False

    def room(self) -> int | Tensor:
        """Tokens that the layer may hold, as policies are told: see `ScoreContext.budget`."""
        return self.asked.tokens or self.budget.capacity

    def limits(self, pinned: Tensor, positions: Tensor, least: Tensor) -> Tensor | None:
        """`[B, S]` tokens that each set may hold from now on; None = all the same.

        Args:
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
            least: `[B]` tokens that each set has to have room for, in whole blocks.
        """
        return None


#: Makes the quota of a layer from the budget that it was given.
MakeQuota = Callable[[BlockBudget], Quota]


class SharedQuota(Quota):
    """A number for each row, or for each row and KV head, from what is shared out among layers.

    Args:
        asked: see `Quota`.
        cascade: one object per cache.
        place: of the layer among those of the cascade.
    """

    unequal = decides = True

    def __init__(self, asked: BlockBudget, cascade: Cascade, place: int) -> None:
        super().__init__(asked)
        self._cascade, self._place = cascade, place
        self.foresees = cascade.foresees
        self._here = slice(None)  # heads of the layer that this process holds

    def check(self, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `Quota.check`."""
        self._cascade.check_heads(self._place, kv_heads * local_heads.processes(kv_heads))
        first = local_heads.first_head(kv_heads)
        self._here = slice(first, first + kv_heads)

    def decide(
        self, held: int, local_heads: LocalHeads, queries: Queries, key_positions: Tensor, query_positions: Tensor
    ) -> bool:
        """See `Quota.decide`."""
        if self._place == 0 and held == 0:
            self._cascade.clear()  # another prompt
        if self._place == 0 and self._cascade.share(0) is None:
            self._cascade.begin(self.budget)
        return self._cascade.attended(self._place, local_heads, queries, key_positions, query_positions)

    def foresee(self, filled: Tensor, seen: int) -> Tensor | None:
        """See `Quota.foresee`."""
        if self._place == 0:
            if self._cascade.share(0) is None:
                self._cascade.begin(self.budget)
            self._cascade.foresee(filled, seen)
        return self._cascade.foreseen(seen)

    @property
    def _share(self) -> Tensor | None:
        """`[B, 1 or H]` tokens, of the heads that are here."""
        share = self._cascade.share(self._place)
        return share if share is None or share.shape[1] == 1 else share[:, self._here]

    def room(self) -> int | Tensor:
        """See `Quota.room`."""
        share = self._share
        return self.budget.capacity if share is None else share[..., None]

    def limits(self, pinned: Tensor, positions: Tensor, least: Tensor) -> Tensor | None:
        """See `Quota.limits`."""
        share = self._share
        mean = torch.full((len(positions), 1), self.budget.capacity, device=positions.device)
        return (mean if share is None else share.to(mean)).expand(-1, pinned.shape[1])


class HeadQuota(Quota):
    """A number for each row and KV head.

    Args:
        asked: see `Quota`.
        allocator: shares out among the heads of a layer.
    """

    unequal = True

    def __init__(self, asked: BlockBudget, allocator: HeadAllocator) -> None:
        super().__init__(asked)
        self._allocator = allocator

    def check(self, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `Quota.check`."""
        if local_heads.processes(kv_heads) > 1:
            raise ValueError(
                f"The allocator {self._allocator.name!r} compares all KV heads of a layer, and tensor parallelism "
                "gave some to other processes, which would have to make room for what is decided here. Use "
                "allocator='uniform' or one that shares out among layers, or keep the model in one process."
            )

    def limits(self, pinned: Tensor, positions: Tensor, least: Tensor) -> Tensor | None:
        """See `Quota.limits`."""
        size, tokens, sets = self.asked.block_size, self.asked.capacity, positions.shape[1]
        weights = self._allocator.weights(pinned, tokens)
        most = -(-(positions[:, 0] >= 0).sum(-1) // size)
        blocks = share_out(weights, tokens // size * sets, least // size, most)
        return blocks.to(positions.device) * size
