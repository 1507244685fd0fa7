"""What gates said of the tokens that a layer holds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...integration.heads import LocalHeads
from ...parts import persistent
from ...store.columns import Columns
from ...store.room import Room


@dataclass(frozen=True)
class GateMarks:
    """Makes the marks of each layer.

    Attributes:
        gates: digest of the gates that tell them.
    """

    gates: str

    def __call__(self, label: str, layer_idx: int, local_heads: LocalHeads, static: bool) -> "LayerMarks":
        """See `MakeMarks`."""
        return LayerMarks(self.gates, label, layer_idx, local_heads, static)


class LayerMarks:
    """The marks of the tokens in a layer's slots, see `policies.marks`.

    A gate reads the hidden state that goes into attention, just before the layer's `update`. So its marks of the new
    tokens are `told` first, `update` takes them, and from then on they move with the tokens.

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
        self._told: Tensor | None = None
        self._new: Tensor | None = None  # [B, H, n]

    # ---- new tokens -----------------------------------------------------------------------------------------------

    def tell(self, marks: Tensor) -> None:
        """A gate's marks `[B, all KV heads, n]` of the tokens whose keys and values come next."""
        self._told = marks

    def arrived(self, keys: Tensor) -> None:
        """See `Marks.arrived`.

        Raises:
            RuntimeError: no gate has told of them.
            ValueError: it told of other tokens.
        """
        marks, self._told = self._told, None
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
        self._new = own.to(keys.device)

    @property
    def new(self) -> Tensor:
        """`[B, H, n]` of the new tokens, until they are held."""
        if self._new is None:
            raise RuntimeError("No tokens have come.")
        return self._new

    # ---- slots ----------------------------------------------------------------------------------------------------

    def start(self, rows: int, heads: int, slots: int, device: torch.device) -> None:
        """See `Marks.start`."""
        shape, held = (rows, heads, slots), self.columns.tensors
        if not held or (held[0].shape, held[0].device) != (shape, device):
            self.columns.use(self.columns.room.make(shape, torch.float32, device))

    def append(self, held: int, count: int) -> None:
        """See `Marks.append`."""
        self.columns.append(held, [self.new[:, :, :count]])
        self._new = None

    def overwrite(self, slots: Tensor, real: Tensor | None = None) -> None:
        """See `Marks.overwrite`."""
        self.columns.overwrite(slots, [self.new[:, :, :1]], None if real is None else real[..., None])
        self._new = None

    def keep(self, kept: Tensor, held: int, count: int) -> None:
        """See `Marks.keep`."""
        self.columns.take([self.of_all(held, count)], kept, views=count == 0)
        self._new = None if count else self._new

    def reorder(self, order: Tensor) -> None:
        """See `Marks.reorder`."""
        self.columns.reorder(order)

    def resize(self, slots: int, held: int) -> None:
        """See `Marks.resize`."""
        self.columns.resize(slots, held)

    # ---- reading --------------------------------------------------------------------------------------------------

    def of_all(self, held: int, count: int) -> Tensor:
        """See `Marks.of_all`."""
        inside = self.at(None, held)
        return torch.cat([inside, self.new[:, :, :count]], dim=-1) if count else inside

    def at(self, slots: Tensor | None, held: int) -> Tensor:
        """See `Marks.at`."""
        return self.columns.first(held)[0] if slots is None else self.columns.at(slots)[0]

    @property
    def bytes(self) -> int:
        """Of the marks kept."""
        return self.columns.bytes

    # ---- life -----------------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Marks.map_rows`."""
        self.columns.map_rows(change)
        self._new = None if self._new is None else change(self._new)

    def clear(self) -> None:
        """See `Marks.clear`; the room stays."""
        self._told = self._new = None

    def snapshot(self, held: int) -> Tensor:
        """See `Marks.snapshot`."""
        return persistent(self.at(None, held))

    def restore(self, saved: Tensor, slots: int, device: torch.device) -> None:
        """See `Marks.restore`."""
        self.start(saved.shape[0], saved.shape[1], slots, device)
        self.columns.append(0, [saved.to(device)])
