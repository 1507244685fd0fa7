"""Blocks of tokens in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...store.tensors import byte_count


@dataclass(frozen=True)
class _Delivery:
    """Tokens on their way from an accelerator."""

    arrived: Any  # torch.cuda.Event
    places: tuple[Tensor, Tensor, Tensor]
    states: Tensor


@dataclass(frozen=True)
class Fetched:
    """Blocks on the layer's device, or on their way to it.

    Attributes:
        states: `[m, h, P, width]`.
        arrived: event of the copy's stream; None where the copy is done.
    """

    states: Tensor
    arrived: Any = None

    def wait(self) -> Tensor:
        """The states. Later operations on the device's stream wait for the copy; the host does not."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.states.device)
            stream.wait_event(self.arrived)
            self.states.record_stream(stream)
        return self.states


class HostBlocks:
    """The texts of all rows in host memory: block `n` holds the tokens at positions `n * P` and after.

    The key and the value of a token lie side by side, so that blocks come back in one copy. Copies from an accelerator
    run on a stream of their own, and are stored when a block is next read. Copies to an accelerator come from pinned
    memory, on request on a second stream. (Written for CUDA, but tested on a CPU only, where copies are not
    asynchronous.)

    Attributes:
        states: `[B, H, N, P, width]` in host memory; zero until a token is written.
        block_size: `P`.

    Args:
        like: keys and values `[B, H, n, D]` of the layer.
        block_size: `P`.
    """

    def __init__(self, like: Sequence[Tensor], block_size: int) -> None:
        self.device = like[0].device
        self.block_size = block_size
        self._widths = [part.shape[-1] for part in like]
        self._on_accelerator = self.device.type == "cuda"
        self._away, self._back = (torch.cuda.Stream(self.device) if self._on_accelerator else None for _ in range(2))
        self._under_way: list[_Delivery] = []
        shape = (*like[0].shape[:2], 0, block_size, sum(self._widths))
        self.states = self._room(shape, like[0].dtype)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, pin_memory=self._on_accelerator, device="cpu")

    def parts(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, which lie side by side in `states` `[..., width]`; views."""
        keys, values = states.split(self._widths, dim=-1)
        return keys, values

    @property
    def blocks(self) -> int:
        """Number of blocks that there is room for."""
        return self.states.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return byte_count(self.states)

    def reserve(self, blocks: int) -> None:
        """Make room for so many blocks. If the storage grows, it grows by a quarter at least."""
        if blocks <= self.blocks:
            return
        self._receive()
        blocks = max(blocks, self.blocks * 5 // 4)
        old = self.states
        self.states = self._room((*old.shape[:2], blocks, *old.shape[3:]), old.dtype)
        self.states[:, :, : old.shape[2]] = old

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def write(self, row: Tensor, head: Tensor, position: Tensor, states: Sequence[Tensor]) -> None:
        """Store tokens: `row`, `head`, `position` `[m]` int64, keys and values `[m, D]`, all on the layer's device."""
        places, together = (row, head, position), torch.cat([*states], dim=-1)
        if self._away is None:
            self._put(places, together)
            return
        self._away.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._away):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in (*places, together)]
            for tensor in (*places, together):
                tensor.record_stream(self._away)
        self._under_way.append(_Delivery(_recorded(self._away), (copies[0], copies[1], copies[2]), copies[3]))

    def _put(self, places: tuple[Tensor, Tensor, Tensor], states: Tensor) -> None:
        row, head, position = places
        self.states[row, head, position // self.block_size, position % self.block_size] = states

    def _receive(self) -> None:
        for delivery in self._under_way:
            delivery.arrived.synchronize()
            self._put(delivery.places, delivery.states)
        self._under_way.clear()

    def read(self, row: Tensor, head: Tensor, block: Tensor) -> Tensor:
        """Blocks `[..., P, width]` on the layer's device, in one copy.

        Args:
            row, head, block: int64 in host memory, of shapes that broadcast to `[...]`.
        """
        self._receive()
        blocks = self.states[row, head, block]
        return blocks.pin_memory().to(self.device, non_blocking=True) if self._on_accelerator else blocks

    def ahead(self, make: Callable[[], Tensor]) -> Fetched:
        """Run `make` on the second stream, for later use: operations that are queued now do not wait for it."""
        if self._back is None:
            return Fetched(make())
        with torch.cuda.stream(self._back):
            return Fetched(make(), _recorded(self._back))

    def span(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, n, D]` of all blocks `first .. last`, on the layer's device."""
        self._receive()
        tokens = self.states[:, :, first:last].flatten(2, 3)
        return self.parts(tokens.pin_memory().to(self.device, non_blocking=True) if self._on_accelerator else tokens)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`. Copies everything, unless nothing changes."""
        self._receive()
        rows = rows.cpu()
        if not torch.equal(rows, torch.arange(self.states.shape[0], device="cpu")):
            old = self.states
            self.states = self._room((len(rows), *old.shape[1:]), old.dtype)
            torch.index_select(old, 0, rows, out=self.states)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def first(self, blocks: int) -> Tensor:
        """The states of the first blocks, a view."""
        self._receive()
        return self.states[:, :, :blocks]

    def fill(self, states: Tensor) -> None:
        """Replace all blocks by these `[B, H, n, P, width]`."""
        self._under_way.clear()
        self.states = self._room(tuple(states.shape), states.dtype)
        self.states.copy_(states)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
