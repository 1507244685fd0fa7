"""Marks: what a policy is told of each token from outside the cache, when the token comes."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..integration.heads import LocalHeads


class Marks(Protocol):
    """The part of a layer that keeps one number per token and KV head, and moves it with the token.

    Whoever tells finds it as `layer.marks`, before the layer's `update`.

    Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 or `H`), `C` slots.

    Attributes:
        bytes: of all slots.
    """

    @property
    def bytes(self) -> int: ...

    def arrived(self, keys: Tensor) -> None:
        """The tokens with these keys `[B, H, n, dim]` have come: from now on they are the new ones."""

    def append(self, held: int, count: int) -> None:
        """The first `count` new tokens lie behind the `held` ones."""

    def overwrite(self, slots: Tensor, real: Tensor | None = None) -> None:
        """The single new token lies in `slots` `[B, S, 1]`; `real` `[B, 1]` False where it is a pad, which overwrites
        nothing."""

    def keep(self, kept: Tensor, held: int, count: int) -> None:
        """Of the `held` tokens and, behind them, `count` new ones, those at `kept` `[B, S, C]` stay."""

    def of_all(self, held: int, count: int) -> Tensor:
        """`[B, H, held + count]` float32, of the tokens held and of new ones behind them."""

    def at(self, slots: Tensor | None, held: int) -> Tensor:
        """`[B, H, n]` float32, of the tokens in the slots `[B, S, n]`, or of all that are held."""

    def start(self, rows: int, heads: int, slots: int, device: torch.device) -> None:
        """The first tokens of a text are about to come."""

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[B, S, held]`."""

    def resize(self, slots: int, held: int) -> None:
        """Have another number of slots; the `held` tokens stay in theirs."""

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""

    def clear(self) -> None:
        """Forget everything."""

    def snapshot(self, held: int) -> Tensor:
        """`[B, H, held]` float32, to be saved."""

    def restore(self, saved: Tensor, slots: int, device: torch.device) -> None:
        """The reverse of `snapshot`."""


#: Makes the marks of a layer, given the policy's label, the layer's index, which KV heads are here, and whether steps
#: are compiled. Two that are equal make marks of one source.
MakeMarks = Callable[[str, int, LocalHeads, bool], Marks]
