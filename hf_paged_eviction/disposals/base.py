"""The one exit through which tokens leave a layer, and the choice of what becomes of them.

Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 where all KV heads share theirs, else `H`), `C` slots, `P` block
size, `D` head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention.parts import Part, Read
from ..integration.heads import LocalHeads
from ..naming import Named
from ..policies import EvictionPolicy
from ..policies.needs import Heads
from ..queries.observer import Queries
from ..saved import SavedState, StateDict
from ..store.arriving import StateKind
from ..store.store import Store
from ..table.budget import BlockBudget
from ..table.table import BlockTable


@dataclass(frozen=True)
class Held:
    """Tokens of one layer.

    Attributes:
        keys: `[B, H, n, D]`.
        values: as `keys`.
        positions: `[B, S, n]` int64, -1 where no real token is, or none that is meant.
        scores: `[B, S, n]` float32, what the policy thinks of them, where tokens are chosen: in `plan` and `overflow`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class Asked:
    """A forward of a layer whose attention is about to be worked out.

    Attributes:
        queries: of the forward, and the keys they will be compared with: `[B, H, tokens, D]`, the slots of the layer
            or, if `waiting`, a copy of them with the new tokens behind.
        values: as the keys.
        table: of the layer.
        waiting: whether the new tokens are not in the table yet.
        real: `[B, q]` bool, which of the new tokens are no pads; None = all.
        as_given: whether attention has the very tensors that the cache returned.
    """

    queries: Queries
    values: Tensor
    table: BlockTable
    waiting: bool
    real: Tensor | None
    as_given: bool


@dataclass(frozen=True)
class Site:
    """What an action knows of its layer.

    Attributes:
        store: where keys and values lie. Its tensors are replaced as it grows: ask for them anew.
        heads: whether the KV heads choose together.
        local_heads: which of the layer's KV heads this process holds.
        sizes: in tokens; how many the layer may hold may change.
        absolute_noise: of the policy's scores, see `Needs`.
    """

    store: Store
    heads: Heads
    local_heads: LocalHeads
    sizes: BlockBudget
    absolute_noise: bool = False


@dataclass(frozen=True)
class Surroundings:
    """What a disposal has to go together with.

    Attributes:
        config: of the model's decoder.
        sizes: what the user asked for.
        policy, heads: of the cache.
        static: whether steps are compiled.
        uniform: whether all layers, rows and heads hold equally many tokens.
        latent: whether the model caches latents (MLA).
        positions: "text" or "cache", of the cache.
        coded: the option by which keys or values are kept in fewer bits or numbers, "bits="; "" where they are not.
    """

    config: Any
    sizes: BlockBudget
    policy: EvictionPolicy
    heads: Heads
    static: bool
    uniform: bool
    latent: bool
    positions: str
    coded: str

    def refuse(self, disposal: str, **reasons: str) -> None:
        """Refuse a cache of one of these kinds.

        Args:
            disposal: its label.
            **reasons: by kind, those below, why it is refused and what to use instead.

        Raises:
            ValueError: with kind, reason and way out.
        """
        kinds = {
            "static": (self.static, "static=True"),
            "allocator": (not self.uniform, "an allocator"),
            "latent": (self.latent, "a model that caches latents (MLA)"),
            "queries": (self.policy.needs.queries, f"the policy {self.policy.label!r}"),
            "shared": (
                bool(getattr(self.config, "num_kv_shared_layers", 0)),
                "a model whose layers share keys and values",
            ),
            "share": (self.sizes.keep_ratio is not None, "a share as budget"),
            "memory": (self.sizes.memory is not None, "bytes as budget"),
            "coded": (self.coded != "", self.coded),
            "positions": (self.positions != "text", f"positions={self.positions!r}"),
        }
        for kind, reason in reasons.items():
            refused, name = kinds[kind]
            if refused:
                raise ValueError(f"{disposal} does not go together with {name}: {reason}.")


class EvictionAction:
    """The part of a layer through which its tokens leave. This one does nothing with them.

    A block leaves token by token: a victim's tokens can be attended to until each is overwritten. So what needs the
    whole block is worked out in `plan`, when the block is chosen, and `evict_token` acts on one token at a time.

    Neither reads a tensor on the host.

    Attributes:
        plans: whether `plan` wants to be called.
        takes: whether `evict_token` wants to be called. `overflow` is called if either of them is.
        reads: whether `extra_attention` and `logit_bias` want to be called. Nothing is computed for an action that says
            no to all.
        picks_blocks: whether it holds whole blocks of consecutive tokens, and says itself which of them goes next: a
            layer then asks `scores` in place of the policy, and `best_blocks` after a forward of several tokens.
        device_bytes: what it keeps on the layer's device, beside the slots.
        host_bytes: what it keeps in host memory.
        faults: blocks that a query needed and that were not in the slots, in all rows and sets.
        tokens_beside: real tokens that have left their slots and that attention still sees as they are here, summed
            over rows, a mean over sets. Reads tensors.
    """

    plans = False
    takes = False
    reads = False
    picks_blocks = False

    @property
    def tokens_beside(self) -> int:
        return 0

    @property
    def faults(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        return 0

    def most_bytes(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """For budgets in bytes: what it will keep on the device beside the slots at most, and what it takes there for a
        moment, one layer after the other. States like `keys` and `values` are coming."""
        return 0, 0

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """A block was chosen whose slots the next tokens overwrite. Called on the host.

        Args:
            slots: `[B, S, P]` int64, in the order in which they will be overwritten.
            begins: `[B, S]` bool, where the block was chosen just now. Elsewhere some of these slots have been
                overwritten already, or they hold pads.
            held: all `C` slots; views that may be written to.
        """

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """These tokens leave: no other call will show them.

        Args:
            leaving: copies of what stands in the slots; position -1 where nothing leaves.
            slots: `[B, S, 1]` int64, which a new token is about to overwrite; None after a forward of several tokens.
        """

    def overflow(self, tokens: Held, leaves: Tensor) -> Held:
        """More tokens were held and came than may stay; or the budget, or a quota, became smaller.

        Args:
            tokens: all of them. They must not be written to.
            leaves: `[B, S, n]` bool, which of them go.

        Returns:
            The tokens to choose the kept ones from: `tokens`, or others of the same shape in their place.
        """
        self.evict_token(replace(tokens, positions=tokens.positions.masked_fill(~leaves, -1)), None)
        return tokens

    def slot_bytes(self, token_bytes: int) -> int:
        """What a slot of `token_bytes` takes together with its share of what is kept beside the slots on the device,
        where that is as much as fits into the memory of the cache."""
        return token_bytes

    def scores(self, table: BlockTable) -> Tensor:
        """`[B, S, C]` float32 in slot order: the block whose tokens have the lowest number goes next. Where
        `picks_blocks`."""
        raise NotImplementedError

    def best_blocks(
        self, table: BlockTable, scores: Tensor, positions: Tensor, columns: int, sizes: BlockBudget
    ) -> Tensor:
        """Indices `[B, S, C]` of the tokens that stay after a forward of several. Where `picks_blocks`.

        Args:
            scores: `[B, S, n]` of the policy, of the tokens held and of new ones behind them.
            positions: `[B, 1 or S, n]`.
            columns: seen by then, pads included.
            sizes: of the layer now.
        """
        raise NotImplementedError

    def extra_attention(self, asked: Asked) -> Iterable[Part | Read] | None:
        """Attention is about to be worked out; the slots may still be changed.

        Returns:
            What the queries attend to besides, taken one after the other; None = nothing. No token may be in two
            places.
        """

    def logit_bias(self, tokens: int) -> Tensor | None:
        """`[B, H, 1, tokens]` float32, what is added to the logits of the tokens that attention was given: those in the
        slots, and new ones behind them, if they wait. None = nothing."""
        return None

    def check_crop(self, count: int) -> None:
        """Refuse to take back tokens that are in the slots, if that cannot be done.

        Raises:
            ValueError: with the way out.
        """

    def check_removal(self, left: bool, ends: bool) -> None:
        """Refuse to lose tokens that a later mask hides, if something of them may stay.

        Args:
            left: whether tokens have left the slots.
            ends: whether no token of their rows is visible behind any of those that are hidden.

        Raises:
            ValueError: with the way out.
        """
        if left and (self.plans or self.takes):
            raise ValueError(
                "attention_mask hides tokens of the past, and tokens have left this cache through its disposal, which "
                "keeps something of them and cannot tell what of it belongs to the hidden ones. Use disposal='drop', "
                "a budget that holds the whole text, or keep the mask of the past as it was."
            )

    # ---- rows and life --------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, sets: int, capacity: int, device: torch.device) -> None:
        """The first forward has come: `B`, `H`, `S` and `C` are known."""

    def settle(self, kept: Tensor | None, positions: Tensor, capacity: int) -> None:
        """The slots were filled anew, or have become more or fewer. Called where `takes`.

        Args:
            kept: `[B, S, C]`, which of the tokens that `overflow` was given, or of those held, each slot has now; None
                = each has what it had.
            positions: `[B, S, held]` of what is in the slots now; where it is -1, an index means nothing.
            capacity: slots that there may be from now on.
        """

    def move(self, order: Tensor | None, held: int) -> None:
        """Tokens were taken back, or slots sorted.

        Args:
            order: `[B, S, n]`, slot that each token moved from; None = none moved.
            held: slots in use now.
        """

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to everything."""

    def clear(self) -> None:
        """Forget everything: the layer begins anew."""

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict | None:
        """All that it holds, by name; None = nothing.

        Raises:
            ValueError: it does something with tokens and does not say what it holds of them.
        """
        if self.plans or self.takes:
            raise ValueError(
                f"a {type(self).__name__} has no state_dict(), so what became of evicted tokens is not known"
            )
        return None

    def load_state(self, saved: SavedState | None, table: BlockTable, kind: StateKind) -> None:
        """Hold what another one held.

        Args:
            saved: what `state_dict` returned, or what somebody made to look like it.
            table: of the layer, as it is now.
            kind: what keys and values are like.

        Raises:
            ValueError: that does not fit: shapes, or numbers that would point outside. The file may come from anybody.
        """
        if saved is not None:
            raise ValueError(f"{saved.name}: a {type(self).__name__} has no load_state()")


class Disposal(Named, ABC):
    """What happens to evicted tokens; the argument `disposal=` of a cache.

    Like a policy, a disposal holds parameters only, and is best a frozen dataclass. What it keeps of one layer lies in
    the `EvictionAction` that it makes for it.

    Class attributes:
        name: set by `register_disposal`.
        paper: arXiv id, or None.
        needs_queries: whether the actions want to be asked before attention; the model must then use the attention
            implementation "paged_eviction". A property where it depends on the parameters.
    """

    needs_queries: ClassVar[bool] = False

    def check(self, around: Surroundings) -> None:
        """Refuse what this disposal cannot serve.

        Raises:
            ValueError: with the reason and the way out.
        """

    def check_sizes(self, sizes: BlockBudget) -> None:
        """Refuse a budget, also that of `shrink`, as `check` does."""

    @abstractmethod
    def action(self, site: Site) -> EvictionAction:
        """The part of one layer."""

    def introduce(self, actions: Sequence[EvictionAction]) -> None:
        """Let the actions of a cache know of each other; they come in the order of the layers."""
