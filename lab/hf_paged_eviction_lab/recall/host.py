"""Blocks of tokens in host memory, and those of them that are fetched ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import byte_count

#: Row, set of KV heads and number of a block.
Place = tuple[int, int, int]


def places_of(ids: Tensor) -> list[Place]:
    """The places of the blocks `ids` `[B, S, K]` that are not -1, set by set; `ids` is in host memory."""
    row, set_, at = (ids >= 0).nonzero(as_tuple=True)
    return [*zip(row.tolist(), set_.tolist(), ids[row, set_, at].tolist(), strict=True)]


@dataclass(frozen=True)
class _Delivery:
    """Tokens on their way from an accelerator."""

    arrived: Any  # torch.cuda.Event
    index: list[Tensor]
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
        sets: `S`, 1 if the KV heads choose together, else `H`.

    Args:
        like: keys and values `[B, H, n, D]` of the layer.
        block_size: `P`.
        sets: see above.
    """

    def __init__(self, like: Sequence[Tensor], block_size: int, sets: int) -> None:
        self.device, self.sets = like[0].device, sets
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
    def bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return byte_count(self.states)

    def reserve(self, blocks: int) -> None:
        """Make room for so many blocks. If the storage grows, it grows by a quarter at least."""
        held = self.states.shape[2]
        if blocks > held:
            old = self.first()
            self.states = self._room((*old.shape[:2], max(blocks, held * 5 // 4), *old.shape[3:]), old.dtype)
            self.states[:, :, :held] = old

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def write(self, row: Tensor, head: Tensor, position: Tensor, states: Sequence[Tensor]) -> None:
        """Store tokens: `row`, `head`, `position` `[m]` int64, keys and values `[m, D]`, all on the layer's device."""
        index, together = [row, head, position], torch.cat([*states], dim=-1)
        if self._away is None:
            self._put(index, together)
            return
        self._away.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._away):
            *copies, copied = (tensor.to("cpu", non_blocking=True) for tensor in (*index, together))
            for tensor in (*index, together):
                tensor.record_stream(self._away)
        self._under_way.append(_Delivery(_recorded(self._away), copies, copied))

    def _put(self, index: list[Tensor], states: Tensor) -> None:
        (row, head, position), size = index, self.states.shape[3]
        self.states[row, head, position // size, position % size] = states

    def first(self, blocks: int | None = None) -> Tensor:
        """The states of the first blocks, or of all, a view."""
        for delivery in self._under_way:
            delivery.arrived.synchronize()
            self._put(delivery.index, delivery.states)
        self._under_way.clear()
        return self.states[:, :, :blocks]

    def _to_device(self, states: Tensor) -> Tensor:
        return states.pin_memory().to(self.device, non_blocking=True) if self._on_accelerator else states

    def read(self, places: Sequence[Place]) -> Tensor:
        """These blocks `[m, h, P, width]` on the layer's device, in one copy; `h` KV heads of each set."""
        states = self.first()
        row, set_, block = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 3, 1).unbind(1)
        heads = set_ if self.sets > 1 else torch.arange(states.shape[1], device="cpu")
        return self._to_device(states[row, heads, block])

    def span(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, n, D]` of all blocks `first .. last`, on the layer's device."""
        return self.parts(self._to_device(self.first(last)[:, :, first:].flatten(2, 3)))

    def ahead(self, make: Callable[[], Tensor]) -> Fetched:
        """Run `make` on the second stream, for later use: operations that are queued now do not wait for it."""
        if self._back is None:
            return Fetched(make())
        with torch.cuda.stream(self._back):
            return Fetched(make(), _recorded(self._back))

    # ---- rows and saving ------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`. Copies everything, unless nothing changes."""
        rows, old = rows.cpu(), self.first()
        if not torch.equal(rows, torch.arange(len(old), device="cpu")):
            self.states = self._room((len(rows), *old.shape[1:]), old.dtype)
            torch.index_select(old, 0, rows, out=self.states)

    def fill(self, states: Tensor) -> None:
        """Replace all blocks by a copy of these `[B, H, n, P, width]`."""
        self._under_way.clear()
        self.states = self._room(tuple(states.shape), states.dtype).copy_(states)


class Stage:
    """Copies of blocks of host memory, on the layer's device. Blocks never change, so copies stay valid.

    Attributes:
        foreseen: number of blocks so far that were here when a query needed them.
    """

    def __init__(self) -> None:
        self.foreseen = 0
        self.empty()

    def empty(self) -> None:
        """Drop all copies, because rows have changed."""
        self._fetched: Fetched | None = None
        self._index: dict[Place, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._fetched is None else self._fetched.states.nbytes

    def take(self, host: HostBlocks, places: Sequence[Place]) -> Tensor:
        """Get blocks, `[m, h, P, width]` on the device: from here, or from host memory."""
        self.foreseen += sum(place in self._index for place in places)
        return self._gather(host, places)

    def fill(self, host: HostBlocks, places: Sequence[Place]) -> None:
        """Hold these blocks from now on. Missing ones are copied while the device does other work."""
        self._fetched = host.ahead(lambda: self._gather(host, places)) if places else None
        self._index = {place: at for at, place in enumerate(places)}

    def _gather(self, host: HostBlocks, places: Sequence[Place]) -> Tensor:
        here = [self._index.get(place, -1) for place in places]
        missing = [at for at, index in enumerate(here) if index < 0]
        if self._fetched is None or len(missing) == len(here):
            return host.read(places)
        states = self._fetched.wait()
        index, gaps = (torch.tensor(numbers, device="cpu") for numbers in (here, missing))
        blocks = states.index_select(0, index.clamp_min(0).to(states.device, non_blocking=True))
        if missing:
            blocks.index_copy_(0, gaps.to(states.device, non_blocking=True), host.read([places[at] for at in missing]))
        return blocks


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
