"""What gates said of the tokens that a layer holds."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...integration.heads import HeadShare
from ...parts import persistent
from ...store.room import static_zeros
from ...store.tensors import byte_count


class Marks:
    """The marks of the tokens in a layer's slots.

    A gate reads the hidden state that goes into attention, just before the layer's `update`. So its marks of the new
    tokens `arrive` first, `update` takes them, and from then on they move with the tokens.

    Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 or `H`), `C` slots.

    Attributes:
        gates: digest of the gates whose marks these are.

    Args:
        gates: see the attribute.
        label: of the policy, for messages.
        layer_idx: index in the model.
        share: which of the layer's KV heads this process holds.
        static: whether the tensor stays where it is, for compiled steps.
    """

    def __init__(self, gates: str, label: str, layer_idx: int, share: HeadShare, static: bool) -> None:
        self.gates = gates
        self._label, self._layer_idx, self._share, self._static = label, layer_idx, share, static
        self._arrived: Tensor | None = None
        self._coming: Tensor | None = None  # [B, H, n] of the tokens that are being taken in
        self._slots: Tensor | None = None  # [B, H, C]

    # ---- new tokens -----------------------------------------------------------------------------------------------

    def arrive(self, marks: Tensor) -> None:
        """A gate's marks `[B, all KV heads, n]` of the tokens whose keys and values come next."""
        self._arrived = marks

    def take_arrived(self, keys: Tensor) -> Tensor:
        """The marks of the tokens with these keys `[B, H, n, dim]`, `[B, H, n]` float32.

        Raises:
            RuntimeError: no gate has told of them.
            ValueError: it told of other tokens.
        """
        marks, self._arrived = self._arrived, None
        if marks is None:
            raise RuntimeError(
                f"The policy {self._label!r} scores by what gates say of hidden states, and none have told layer "
                f"{self._layer_idx} anything. Call install_gates(model, file) with the same file before the first "
                "forward, and leave them installed for as long as the cache is fed."
            )
        heads = keys.shape[1]
        first = self._share.first_head(heads)
        own = marks[:, first : first + heads]
        if own.shape != keys.shape[:3] or marks.shape[1] != heads * self._share.processes(heads):
            raise ValueError(
                f"Gates told layer {self._layer_idx} of {marks.shape[0]} rows, {marks.shape[1]} KV heads and "
                f"{marks.shape[2]} tokens, and keys of {keys.shape[0]} rows, "
                f"{heads * self._share.processes(heads)} KV heads and {keys.shape[2]} tokens came. These are gates of "
                "another model."
            )
        return own.to(keys.device)

    def expect(self, marks: Tensor | None) -> None:
        """The tokens with these marks are being taken in."""
        self._coming = marks

    # ---- slots ----------------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, slots: int, device: torch.device) -> None:
        """Make room for a new prompt."""
        shape = (rows, heads, slots)
        if self._slots is None or (self._slots.shape, self._slots.device) != (shape, device):
            if self._static:
                self._slots = static_zeros(shape, device, torch.float32)
            else:
                self._slots = persistent(torch.zeros(shape, device=device))

    def append(self, held: int) -> None:
        """The tokens that are being taken in lie behind the `held` ones."""
        slots, coming = self.slots, self.coming
        slots[:, :, held : held + coming.shape[2]] = coming

    def overwrite(self, slot: Tensor, real: Tensor | None = None) -> None:
        """The single token that is being taken in lies in `slot` `[B, S, 1]`; `real` `[B, 1]` False where it is a pad,
        which overwrites nothing."""
        slots, coming = self.slots, self.coming
        slot = slot.expand(-1, slots.shape[1], -1)
        if real is not None:
            coming = torch.where(real[:, None], coming, slots.gather(-1, slot))
        slots.scatter_(-1, slot, coming)

    def keep(self, kept: Tensor, held: int, count: int) -> None:
        """Of the `held` tokens and, behind them, the `count` new ones, those at `kept` `[B, S, C]` stay."""
        found = self.of_all(held, count)
        self._put(found.gather(-1, kept.expand(-1, found.shape[1], -1)))

    def move(self, order: Tensor, held: int) -> None:
        """The token in each of the `held` slots moved there from `order` `[B, S, held]`."""
        inside = self.slots[:, :, :held]
        inside.copy_(inside.gather(-1, order.expand(-1, inside.shape[1], -1)))

    def resize(self, slots: int) -> None:
        """There are so many slots now; tokens stay in theirs."""
        old = self.slots
        if slots == old.shape[2]:
            return
        least = min(slots, old.shape[2])
        self._slots = None
        self.start(old.shape[0], old.shape[1], slots, old.device)
        self.slots[:, :, :least] = old[:, :, :least]

    def _put(self, marks: Tensor) -> None:
        old = self._slots
        if old is not None and old.shape == marks.shape:
            old.copy_(marks)
        else:
            self._slots = None
            self.start(marks.shape[0], marks.shape[1], marks.shape[2], marks.device)
            self.slots.copy_(marks)

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> Tensor:
        """`[B, H, C]` float32 in slot order."""
        if self._slots is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._slots

    @property
    def coming(self) -> Tensor:
        """`[B, H, n]` of the tokens that are being taken in."""
        if self._coming is None:
            raise RuntimeError("No tokens are being taken in.")
        return self._coming

    def of_all(self, held: int, count: int) -> Tensor:
        """`[B, H, held + count]`, of the tokens held and the new ones behind them."""
        inside = self.slots[:, :, :held]
        return torch.cat([inside, self.coming], dim=-1) if count else inside

    def at(self, slots: Tensor | None, held: int) -> Tensor:
        """`[B, H, n]`, of the tokens in the slots `[B, S, n]`, or of all that are held."""
        if slots is None:
            return self.slots[:, :, :held]
        return self.slots.gather(-1, slots.expand(-1, self.slots.shape[1], -1))

    @property
    def bytes(self) -> int:
        """Of the marks kept."""
        return byte_count(self._slots)

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to everything."""
        if self._slots is not None:
            self._put(change(self._slots))

    def clear(self) -> None:
        """Forget everything; the room stays."""
        self._arrived = self._coming = None

    def snapshot(self, held: int) -> Tensor:
        """`[B, H, held]`."""
        return persistent(self.slots[:, :, :held])

    def restore(self, saved: Tensor, slots: int, device: torch.device) -> None:
        """Know what another layer's marks were."""
        self.start(saved.shape[0], saved.shape[1], slots, device)
        self.slots[:, :, : saved.shape[2]] = saved.to(device)
