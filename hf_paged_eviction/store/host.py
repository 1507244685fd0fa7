"""Blocks of keys and values in host memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensors import byte_count


@dataclass(frozen=True)
class _Delivery:
    """Tokens on their way from an accelerator."""

    arrived: Any  # torch.cuda.Event
    places: tuple[Tensor, Tensor, Tensor]
    keys: Tensor
    values: Tensor


class HostBlocks:
    """Keys and values of whole texts, block by block: block `n` holds the tokens at positions `n * P` and after.

    From an accelerator, copies to the host run on a stream of their own and are written down when something is next
    read. (Written for CUDA and tested on a CPU only, where every copy is done at once.)

    Attributes:
        keys, values: `[B, H, N, P, D]` in host memory; what was never written is zero.

    Args:
        like_keys, like_values: `[B, H, n, D]` states of the layer.
        block_size: `P`.
    """

    def __init__(self, like_keys: Tensor, like_values: Tensor, block_size: int) -> None:
        self.device = like_keys.device
        self.block_size = block_size
        self._on_accelerator = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._on_accelerator else None
        self._under_way: list[_Delivery] = []
        self.keys, self.values = (
            self._room((*states.shape[:2], 0, block_size, states.shape[-1]), states.dtype)
            for states in (like_keys, like_values)
        )

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, pin_memory=self._on_accelerator)

    @property
    def blocks(self) -> int:
        """For how many blocks there is room."""
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """Of all blocks, used or not."""
        return byte_count(self.keys, self.values)

    def reserve(self, blocks: int) -> None:
        """Make room for so many blocks; where there is less, it grows by a half at least."""
        if blocks <= self.blocks:
            return
        self._settle()
        blocks = max(blocks, self.blocks * 3 // 2)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._room((*old.shape[:2], blocks, *old.shape[3:]), old.dtype)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def write(self, row: Tensor, head: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens down: `row`, `head`, `position` `[m]` int64, states `[m, D]`, all on the layer's device."""
        places = (row, head, position)
        if self._stream is None:
            self._put(places, keys, values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copies = [states.to("cpu", non_blocking=True) for states in (*places, keys, values)]
            for states in (*places, keys, values):
                states.record_stream(self._stream)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        self._under_way.append(_Delivery(arrived, (copies[0], copies[1], copies[2]), copies[3], copies[4]))

    def _put(self, places: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        row, head, position = places
        index = (row, head, position // self.block_size, position % self.block_size)
        self.keys[index], self.values[index] = keys, values

    def _settle(self) -> None:
        for delivery in self._under_way:
            delivery.arrived.synchronize()
            self._put(delivery.places, delivery.keys, delivery.values)
        self._under_way.clear()

    def read(self, row: Tensor, head: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks by index, int64 of shapes that go together `[...]`: keys and values `[..., P, D]` on the device."""
        self._settle()
        index = (row.cpu(), head.cpu(), block.cpu())
        return self._to_device(self.keys[index]), self._to_device(self.values[index])

    def span(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """All blocks `first .. last`: keys and values `[B, H, n, D]` on the layer's device."""
        self._settle()
        return (
            self._to_device(self.keys[:, :, first:last].flatten(2, 3)),
            self._to_device(self.values[:, :, first:last].flatten(2, 3)),
        )

    def _to_device(self, states: Tensor) -> Tensor:
        return states.pin_memory().to(self.device, non_blocking=True) if self._on_accelerator else states

    # ---- rows -----------------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Row `i` becomes what row `rows[i]` was. Copies all of it, unless nothing changes."""
        self._settle()
        rows = rows.cpu()
        if not torch.equal(rows, torch.arange(self.keys.shape[0])):
            with torch.inference_mode(False):
                self.keys, self.values = self.keys[rows], self.values[rows]
