"""Marks: a number per token from outside the cache, for policies that need one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from .columns import Columns
from .room import Room


@dataclass(frozen=True)
class MarkSource:
    """Describes the source of marks: numbers per token and KV head that come from outside the cache.

    Attributes:
        source: name of the source. It must identify the numbers, because the source compares it with its own name.
        remedy: a sentence for the error message if the source is not installed: what to do.
    """

    source: str
    remedy: str


class Marks:
    """One number for each token in a layer's slots and each KV head, set before the layer's `update`.

    The source sets the marks of new tokens by `layer.marks.tell`. `update` takes them, and from then on they move with
    the tokens.

    Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 or `H`), `C` slots.

    Attributes:
        source: see `MarkSource`.
        columns: one `[B, H, C]` float32, in slot order.

    Args:
        source: source of the marks.
        layer_idx: index in the model.
        local_heads: the KV heads of the layer that this process holds.
        static: whether the tensor keeps its address, for compiled steps.
    """

    def __init__(self, source: MarkSource, layer_idx: int, local_heads: LocalHeads, static: bool) -> None:
        self.source = source.source
        self.columns = Columns(Room(static, zeroed=True))
        self._remedy, self._layer_idx, self._local_heads = source.remedy, layer_idx, local_heads
        self._told: Tensor | None = None
        self._new: Tensor | None = None  # [B, H, n]

    # ---- new tokens -----------------------------------------------------------------------------------------------

    def tell(self, marks: Tensor) -> None:
        """Set the marks `[B, all KV heads, n]` of the tokens whose keys and values come next."""
        self._told = marks

    def arrived(self, keys: Tensor) -> None:
        """Take the marks for the tokens with these keys `[B, H, n, dim]`, which are the new tokens from now on.

        Raises:
            RuntimeError: nobody has set their marks.
            ValueError: the marks are for other tokens.
        """
        marks, self._told = self._told, None
        if marks is None:
            raise RuntimeError(
                f"The policy scores by what it is told of each token, and nobody has told layer {self._layer_idx} "
                f"anything. {self._remedy}"
            )
        heads = keys.shape[1]
        first = self._local_heads.first_head(heads)
        own = marks[:, first : first + heads]
        if own.shape != keys.shape[:3] or marks.shape[1] != heads * self._local_heads.processes(heads):
            raise ValueError(
                f"Layer {self._layer_idx} was told of {marks.shape[0]} rows, {marks.shape[1]} KV heads and "
                f"{marks.shape[2]} tokens, and keys of {keys.shape[0]} rows, "
                f"{heads * self._local_heads.processes(heads)} KV heads and {keys.shape[2]} tokens came: what tells "
                "was made for another model."
            )
        self._new = own.to(keys.device)

    @property
    def new(self) -> Tensor:
        """Marks `[B, H, n]` of the new tokens, until they are held."""
        if self._new is None:
            raise RuntimeError("No tokens have come.")
        return self._new

    # ---- slots ----------------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, slots: int, device: torch.device) -> None:
        """Make room before the first tokens of a text."""
        shape, held = (rows, heads, slots), self.columns.tensors.get("marks")
        if held is None or (held.shape, held.device) != (shape, device):
            self.columns.use({"marks": self.columns.room.make(shape, torch.float32, device)})

    def append(self, held: int, count: int) -> None:
        """Store the marks of the first `count` new tokens behind the `held` ones."""
        self.columns.append(held, {"marks": self.new[:, :, :count]})
        self._new = None

    def overwrite(self, slots: Tensor, real: Tensor | None = None) -> None:
        """Store the mark of the single new token in `slots` `[B, S, 1]`; `real` `[B, 1]` False = a pad, which
        overwrites nothing."""
        self.columns.overwrite(slots, {"marks": self.new[:, :, :1]}, None if real is None else real[..., None])
        self._new = None

    def keep(self, kept_indices: Tensor, held: int, count: int) -> None:
        """Keep the marks at `kept_indices` `[B, S, C]` among the `held` tokens followed by `count` new ones."""
        self.columns.take({"marks": self.of_all(held, count)}, kept_indices, views=count == 0)
        self._new = None if count else self._new

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[B, S, held]`."""
        self.columns.reorder(order)

    def resize(self, slots: int, held: int) -> None:
        """Change the number of slots. The `held` tokens keep their slots."""
        self.columns.resize(slots, held)

    # ---- reading --------------------------------------------------------------------------------------------------

    def of_all(self, held: int, count: int) -> Tensor:
        """Marks of the held tokens followed by `count` new ones, `[B, H, held + count]`."""
        inside = self.at(None, held)
        return torch.cat([inside, self.new[:, :, :count]], dim=-1) if count else inside

    def at(self, slots: Tensor | None, held: int) -> Tensor:
        """Marks of the tokens in the slots `[B, S, n]`, or of all held tokens: `[B, H, n]`."""
        return (self.columns.first(held) if slots is None else self.columns.at(slots))["marks"]

    # ---- life -----------------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""
        self.columns.map_rows(change)
        self._new = None if self._new is None else change(self._new)

    def clear(self) -> None:
        """Forget all marks. Keep the storage."""
        self._told = self._new = None
