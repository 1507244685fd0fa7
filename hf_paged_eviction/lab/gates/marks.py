"""What gates said of the tokens that a layer holds."""

import torch
from torch import Tensor

from ...integration.heads import LocalHeads
from ...parts import persistent
from ...store.columns import Columns
from ...store.room import Room


class Marks:
    """The marks of the tokens in a layer's slots.

    A gate reads the hidden state that goes into attention, just before the layer's `update`. So its marks of the new
    tokens `arrive` first, `update` takes them, and from then on they move with the tokens.

    Shapes: `B` rows, `H` KV heads, `S` sets of victims (1 or `H`), `C` slots.

    Attributes:
        gates: digest of the gates whose marks these are.
        columns: one `[B, H, C]` float32, in slot order.

    Args:
        gates: see the attribute.
        label: of the policy, for messages.
        layer_idx: index in the model.
        local_heads: which of the layer's KV heads this process holds.
        static: whether the tensor stays where it is, for compiled steps.
    """

    def __init__(self, gates: str, label: str, layer_idx: int, local_heads: LocalHeads, static: bool) -> None:
        self.gates = gates
        self.columns = Columns(Room(static, zeroed=True))
        self._label, self._layer_idx, self._local_heads = label, layer_idx, local_heads
        self._arrived: Tensor | None = None
        self._coming: Tensor | None = None  # [B, H, n] of the tokens that are being taken in

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
        first = self._local_heads.first_head(heads)
        own = marks[:, first : first + heads]
        if own.shape != keys.shape[:3] or marks.shape[1] != heads * self._local_heads.processes(heads):
            raise ValueError(
                f"Gates told layer {self._layer_idx} of {marks.shape[0]} rows, {marks.shape[1]} KV heads and "
                f"{marks.shape[2]} tokens, and keys of {keys.shape[0]} rows, "
                f"{heads * self._local_heads.processes(heads)} KV heads and {keys.shape[2]} tokens came. These are "
                "gates of another model."
            )
        return own.to(keys.device)

    def expect(self, marks: Tensor | None) -> None:
        """The tokens with these marks are being taken in."""
        self._coming = marks

    # ---- slots ----------------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, slots: int, device: torch.device) -> None:
        """Make room for a new prompt."""
        shape, held = (rows, heads, slots), self.columns.tensors
        if not held or (held[0].shape, held[0].device) != (shape, device):
            self.columns.use(self.columns.room.make(shape, torch.float32, device))

    def append(self, held: int) -> None:
        """The tokens that are being taken in lie behind the `held` ones."""
        self.columns.append(held, [self.coming])

    def overwrite(self, slot: Tensor, real: Tensor | None = None) -> None:
        """The single token that is being taken in lies in `slot` `[B, S, 1]`; `real` `[B, 1]` False where it is a pad,
        which overwrites nothing."""
        self.columns.overwrite(slot, [self.coming], None if real is None else real[..., None])

    def keep(self, kept: Tensor, held: int, count: int) -> None:
        """Of the `held` tokens and, behind them, the `count` new ones, those at `kept` `[B, S, C]` stay."""
        anew = count == 0 or kept.shape[-1] != self.columns.shape[2]
        self.columns.take([self.of_all(held, count)], kept, anew)

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def coming(self) -> Tensor:
        """`[B, H, n]` of the tokens that are being taken in."""
        if self._coming is None:
            raise RuntimeError("No tokens are being taken in.")
        return self._coming

    def of_all(self, held: int, count: int) -> Tensor:
        """`[B, H, held + count]`, of the tokens held and the new ones behind them."""
        inside = self.at(None, held)
        return torch.cat([inside, self.coming], dim=-1) if count else inside

    def at(self, slots: Tensor | None, held: int) -> Tensor:
        """`[B, H, n]`, of the tokens in the slots `[B, S, n]`, or of all that are held."""
        return self.columns.first(held)[0] if slots is None else self.columns.at(slots)[0]

    @property
    def bytes(self) -> int:
        """Of the marks kept."""
        return self.columns.bytes

    # ---- life ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything; the room stays."""
        self._arrived = self._coming = None

    def snapshot(self, held: int) -> Tensor:
        """`[B, H, held]`."""
        return persistent(self.at(None, held))

    def restore(self, saved: Tensor, slots: int, device: torch.device) -> None:
        """Know what another layer's marks were."""
        self.start(saved.shape[0], saved.shape[1], slots, device)
        self.columns.append(0, [saved.to(device)])
