"""The one exit through which tokens leave a layer, and the choice of what becomes of them.

Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 where all KV heads share theirs, else `H`), `C` slots, `P` block
size, `D` head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..naming import spell
from ..parts import Snapshot
from ..store.store import Store


@dataclass(frozen=True)
class Held:
    """Tokens of one layer.

    Attributes:
        keys: `[B, H, n, D]`.
        values: as `keys`.
        positions: `[B, S, n]` int64, -1 where no real token is, or none that is meant.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


class Outlet:
    """The part of a layer through which its tokens leave. This one does nothing with them.

    A block leaves token by token: a victim's tokens can be attended to until each is overwritten. So what needs the
    whole block is worked out in `plan`, when the block is chosen, and `let_go` acts on one token at a time.

    Neither reads a tensor on the host. In a static cache `let_go` is part of the compiled step: it then writes to
    tensors that stay where they are (`store.fixed.static_zeros`), and takes no branch that depends on a number.

    Attributes:
        plans: whether `plan` wants to be called.
        takes: whether `let_go` and `overflow` want to be called. Nothing is computed for an outlet that says no.
    """

    plans = False
    takes = False

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        """A block was chosen whose slots the next tokens overwrite. Called on the host, also of a static cache.

        Args:
            slots: `[B, S, P]` int64, in the order in which they will be overwritten.
            begins: `[B, S]` bool, where the block was chosen just now. Elsewhere some of these slots have been
                overwritten already, or they hold pads.
            held: all `C` slots; views that may be written to.
        """

    def let_go(self, leaving: Held, slots: Tensor | None) -> None:
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
        self.let_go(Held(tokens.keys, tokens.values, tokens.positions.masked_fill(~leaves, -1)), None)
        return tokens

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to everything."""

    def clear(self) -> None:
        """Forget everything: the layer begins anew."""

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot | None:
        """All that it holds, with its tensors as fields; None = nothing.

        Raises:
            ValueError: it does something with tokens and does not say what it holds of them.
        """
        if self.plans or self.takes:
            raise ValueError(
                f"a {type(self).__name__} has no snapshot(), so what became of evicted tokens is not known"
            )
        return None

    def restore(self, saved: Snapshot, device: torch.device) -> None:
        """Hold what another one held.

        Raises:
            ValueError: that does not fit: shapes, or numbers that would point outside. The file may come from anybody.
        """
        raise ValueError(f"a {type(self).__name__} has no restore()")


class Disposal(ABC):
    """What becomes of the tokens that leave: a choice of the user's, beside policy and allocator.

    Like a policy, a disposal holds parameters only, and is best a frozen dataclass. What it keeps of one layer lies in
    the `Outlet` that it makes for it.

    Class attributes:
        name: set by `register_disposal`.
        paper: arXiv id, or None.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None

    @property
    def label(self) -> str:
        """The text that `make_disposal` makes this disposal of."""
        return spell(self)

    @abstractmethod
    def outlet(self, store: Store) -> Outlet:
        """The part of one layer.

        Args:
            store: where the layer's keys and values lie. Its tensors are replaced as it grows: ask for them anew.
        """
