"""What a layer does with evicted tokens, and the option that chooses it.

Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 where all KV heads share theirs, else `H`), `C` slots, `P` block
size, `D` head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from ..attention.parts import Extra
from ..integration.heads import LocalHeads
from ..naming import Named
from ..policies import EvictionPolicy
from ..policies.needs import Heads
from ..queries.observer import Queries
from ..store.store import Store
from ..store.tensors import byte_count
from ..table.budget import BlockBudget
from ..table.table import BlockTable
from ..tensors.parts import map_tensors, persistent, tensors_of
from ..tensors.saved import state_of


@dataclass(frozen=True)
class Held:
    """Tokens of one layer.

    Attributes:
        keys: `[B, H, n, D]`.
        values: as `keys`.
        positions: `[B, S, n]` int64, -1 for places without a real token and for tokens to ignore.
        scores: `[B, S, n]` float32, scores of the policy; given in `plan` and `overflow`, where tokens are chosen.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """A forward of a layer, just before its attention.

    Attributes:
        queries: queries of the forward, and the keys that they are compared with: `[B, H, tokens, D]`, the slots of the
            layer or, if `waiting`, a copy of them followed by the new tokens.
        values: as the keys.
        table: of the layer.
        waiting: whether the new tokens are not in the table yet.
        real: `[B, q]` bool, False for pads among the new tokens; None = all are real.
    """

    queries: Queries
    values: Tensor
    table: BlockTable
    waiting: bool
    real: Tensor | None


@dataclass(frozen=True)
class Site:
    """What an action knows about its layer.

    Attributes:
        store: the storage of keys and values. Its tensors are replaced as it grows, so read them each time.
        heads: whether the KV heads choose together.
        local_heads: which of the layer's KV heads this process holds.
        sizes: budget and protected tokens; the budget may change.
        absolute_noise: as in `Needs`, of the policy.
        layer_idx: index in the model.
        previous: the action of the layer before, of those that evict; None = this is the first.
    """

    store: Store
    heads: Heads
    local_heads: LocalHeads
    sizes: BlockBudget
    absolute_noise: bool
    layer_idx: int
    previous: "EvictionAction | None"


@dataclass(frozen=True)
class DisposalContext:
    """The model and the options that a disposal has to work with.

    Attributes:
        config: of the model's decoder.
        sizes: budget and protected tokens.
        policy: of the cache.
        static: whether steps are compiled.
        uniform: whether all layers, rows and heads hold equally many tokens.
        latent: whether the model caches latents (MLA).
        positions: "text" or "cache", of the cache.
        coded: whether keys or values are stored in fewer bits or numbers (`bits=`).
    """

    config: Any
    sizes: BlockBudget
    policy: EvictionPolicy
    static: bool
    uniform: bool
    latent: bool
    positions: str
    coded: bool


class EvictionAction:
    """What one layer does with its evicted tokens. This base class does nothing.

    A block is evicted token by token: the tokens of a victim can be attended to until each is overwritten. `plan` is
    called when the block is chosen, for work that needs the whole block; `evict_token` is called for each token.
    Neither may read a tensor on the host.

    Attributes:
        acts: whether `plan`, `evict_token`, `overflow` and `settle` are to be called.
        reads: whether `extra_attention` is to be called.
        scores: called instead of the policy where single tokens evict blocks: `[B, S, C]` float32 in slot order; the
            block with the lowest scores goes next. None = the policy decides.
        STATE: names of the attributes that files hold: plain values, and tensors with rows in dimension 0, perhaps in
            dataclasses or dictionaries. An action that acts and names none cannot be saved.
    """

    acts = False
    reads = False
    scores: Callable[[], Tensor] | None = None
    STATE: tuple[str, ...] = ()

    @property
    def summary_bytes(self) -> int:
        """Bytes that are kept on the device beside the storage."""
        return byte_count(*tensors_of(state_of(self)))

    def bytes_for(self, keys: Tensor, values: Tensor, slot_bytes: int) -> tuple[int, int]:
        """For budgets in bytes, of one layer: bytes of a slot together with its share of what is kept on the device;
        and the most bytes kept there however many slots there are.

        Args:
            keys, values: of the shape of the states that will come.
            slot_bytes: bytes of a slot alone.
        """
        return slot_bytes, 0

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """A block was chosen, and the next tokens will overwrite its slots. Called on the host.

        Args:
            slots: `[B, S, P]` int64, in the order in which they will be overwritten.
            begins: `[B, S]` bool, True where the block was chosen just now. Elsewhere some of these slots have been
                overwritten already, or hold pads.
            held: all `C` slots; views, which may be written to.
        """

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """Tokens are evicted. This is the last call that shows them.

        Args:
            leaving: copies of the tokens; position -1 where no token is evicted.
            slots: `[B, S, 1]` int64, slots that a new token is about to overwrite; None after a forward of several
                tokens.
        """

    def overflow(self, tokens: Held, leaves: Tensor, kept_indices: Tensor) -> tuple[Held, Tensor]:
        """More tokens are held than may stay, after a forward of several tokens or because a budget became smaller.

        Args:
            tokens: all tokens, held and new. They must not be written to.
            leaves: `[B, S, n]` bool, True for tokens that are evicted.
            kept_indices: `[B, S, C]` int64, the tokens that stay, in slot order.

        Returns:
            The tokens from which the kept ones are taken, `tokens` or others of the same shape; and `kept_indices`, or
            others.
        """
        self.evict_token(replace(tokens, positions=tokens.positions.masked_fill(~leaves, -1)), None)
        return tokens, kept_indices

    def settle(self, kept_indices: Tensor | None, positions: Tensor, capacity: int) -> None:
        """The slots were filled again or sorted, tokens were taken back, or the number of slots changed.

        Args:
            kept_indices: `[B, S, held or more]` int64, the token that each slot now holds: its index among the tokens
                that `overflow` got, or among those held before. None = no token moved.
            positions: `[B, S, held]` of what is in the slots now; where it is -1, ignore the index.
            capacity: number of slots from now on.
        """

    def extra_attention(self, call: AttentionCall) -> Extra | None:
        """Called just before attention; the slots may still be changed. None = attention reads the slots alone."""

    # ---- rows and life --------------------------------------------------------------------------------------------

    def start(self, table: BlockTable | None) -> None:
        """Forget all state. Called at the first forward with the empty table of the layer, when the storage is there;
        None = a layer that was reset waits for its first forward. A file restores the state after this, see `restored`:
        tensors and words must be like those here."""

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all state."""
        for name in self.STATE:
            setattr(self, name, map_tensors(lambda part: persistent(change(part)), getattr(self, name)))

    def check_undo(self, cropped: int, evicted: bool) -> None:
        """Check that tokens in the slots can be taken out, together with anything this action keeps of them.

        Args:
            cropped: how many of the newest tokens `crop` takes back; 0 = a later mask hides tokens.
            evicted: whether some tokens have left the slots.

        Raises:
            ValueError: they cannot; the message says what to do instead.
        """
        if self.acts and evicted and not cropped:
            raise ValueError(
                "attention_mask hides tokens of the past, but this cache has evicted tokens to its disposal, which "
                "cannot remove the hidden ones. Use disposal='drop', a budget that holds the whole text, or keep "
                "the mask of the past as it was."
            )


class Disposal(Named, ABC):
    """Decides what happens to evicted tokens; the option `disposal=` of a cache.

    Like a policy, a disposal holds parameters only; make it a frozen dataclass. The state of one layer is in the
    `EvictionAction` that it makes for the layer.

    Class attributes:
        name: set by `register_disposal`.
        paper: arXiv id, or None.
        needs_queries: whether the cache calls the actions before attention; this needs the attention implementation
            "paged_eviction". A property if it depends on the parameters.
    """

    needs_queries: ClassVar[bool] = False

    def check(self, context: DisposalContext) -> None:
        """Check that this disposal works with the model and the other options; called again for other sizes.

        Raises:
            ValueError: it does not; the message gives the reason and what to use instead.
        """

    @abstractmethod
    def action(self, site: Site) -> EvictionAction:
        """Make the action of one layer."""


@dataclass(frozen=True)
class Drop(Disposal):
    """Evicted tokens are gone: new tokens overwrite their slots."""

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return EvictionAction()
