"""The queries of a full block are observed in several layers at once."""

from collections.abc import Iterator, Sequence

import torch

from ..queries.observer import Observer, observe_blocks
from ..table.table import BlockTable
from .layer_state import LayerState

#: Bytes of the attention weights of layers that are observed together: what a processor's second cache holds. In larger
#: layers the computation takes longer than the calls that would be saved.
MOST_BYTES = 2**20


def observe(layers: Sequence[LayerState]) -> None:
    """Observe the stored queries of layers whose blocks are full in some row."""
    for part in _parts(layers):
        states, observers, tables = [[*column] for column in zip(*part, strict=True)]
        counters, whole = tables[0].counters, all([own.counters.in_step for own in tables])
        full_at = torch.cat([own.phase.full_at for own in tables])
        due = ((counters.seen - full_at) % counters.block_size == 0).any(-1)
        keys = [state.store.read(own.counters.held, ("keys",))[0] for state, own in zip(states, tables, strict=True)]
        seen = counters.seen - torch.cat([own.phase.pads for own in tables])
        observe_blocks(observers, keys, [own.positions for own in tables], seen, due, whole)
        for state in states:
            state.unobserved_at = -1


_Waiting = tuple[LayerState, Observer, BlockTable]


def _parts(layers: Sequence[LayerState]) -> Iterator[list[_Waiting]]:
    """Layers that may be observed together, and are small enough."""
    part: list[_Waiting] = []
    last: tuple[object, ...] = ()
    most = 0
    for layer in layers:
        table, recorder = layer.table, layer.recorder
        if table is None or recorder is None:
            continue
        observer, counters, positions = recorder.observer, table.counters, table.tokens.positions
        kind = counters.seen, positions.shape[:2], positions.device, layer.store.dtype, observer.alike
        if not part or kind != last or (len(part) + 1) * counters.held > most:
            if part:
                yield part
            part, last, most = [], kind, MOST_BYTES // (4 * observer.kept_weights or 1)
        part.append((layer, observer, table))
    if part:
        yield part
