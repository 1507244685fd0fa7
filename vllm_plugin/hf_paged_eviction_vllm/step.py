"""One forward inside vLLM: made before the first layer, on host integers, for all layers and requests of a group.

Attention gets, of each request, the pages that it keeps and those of its new tokens, as one table; a single token is
written over its victim before attention, and of several tokens the best stay after it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_paged_eviction.internals import Entry, Kept, Layout, LiveRequest, Logits, Queries, RequestTable, Step

from .heads import Numbers
from .pages import GroupPages
from .snapshots import Undo


@dataclass(frozen=True)
class Batch:
    """Which sequences attention reads, in one layer or in all.

    Attributes:
        table: `[sequences, width]` int32, pages.
        lengths: `[sequences]` int32, tokens with the new ones.
        longest: the largest of them.
    """

    table: Tensor
    lengths: Tensor
    longest: int


class VllmStep(Step):
    """A forward over vLLM's blocks.

    Args:
        request_table: positions, scores and victims of all live requests.
        pages: keys and values.
        undo: saves what is overwritten, for snapshots.
    """

    def __init__(self, request_table: RequestTable, pages: GroupPages, undo: Undo | None = None) -> None:
        super().__init__(request_table)
        self.pages, self._undo = pages, undo
        self._places = torch.empty(0, device="cpu")
        self._later: list[tuple[LiveRequest, int, Kept]] = []

    # ---- the host's part ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose victims for blocks that are used up, and the places of all tokens. Reads no tensor."""
        table, due = self._request_table, self._due()
        self._rows = self._here([entry.request.number for entry in self.entries])
        # Some request reads a chunk beside the pages that it keeps, or longer than these.
        self._chooses = any(entry.layout is not None for entry in self.entries)
        if self._undo is not None:
            self._undo.mark([entry for entry in self.entries if entry.seen % self.pages.slots == 0])
        if due:
            table.choose(due)
        facts = [(entry.request.number, entry.first, entry.seen, entry.layout is not None) for entry in self.entries]
        counts = self._here([entry.count for entry in self.entries])
        of_tokens = self._here(facts).repeat_interleave(counts, dim=0, output_size=self.count)
        rows, first, seen, chooses = of_tokens.unbind(-1)
        new = torch.arange(self.count, device=table.device) - first
        at = table.next_in_set(rows, seen + new)
        if self._undo is not None:
            kept = self._undo.kept * self.pages.slots
            singles = [entry.first for entry in self.entries if entry.count == 1 and entry.seen >= kept]
            if singles:
                which = self._here(singles)
                self._undo.save(rows[which], seen[which], at[which])
        if self._chooses:
            held, chooses = table.held_in(rows, seen), chooses > 0
            at = torch.where(chooses[:, None], held + new[:, None], at)[..., None]
            pages = self.pages.while_reading(rows, at // self.pages.slots, held, seen, chooses)
            places = pages * self.pages.slots + at % self.pages.slots
        else:
            places = self.pages.places(rows, at[..., None])
        table.positions[places] = (seen + new)[:, None, None].expand_as(places)
        # [L, tokens * S]; kernels take no strides
        self._places = places.view(self.count, table.layers, table.sets).transpose(0, 1).flatten(1).contiguous()

    def _here(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(self.pages.device, non_blocking=True)

    # ---- what attention reads -------------------------------------------------------------------------------------

    def batch(self) -> Batch:
        """What attention reads where all sets are equal: one sequence for each request, its pages are blocks."""
        lengths, own, new = [], [], []
        for entry in self.entries:
            held, chooses = entry.request.layout.held(entry.seen)[0], entry.layout is not None
            lengths.append(held + entry.count if chooses else entry.request.layout.held(entry.request.seen)[0])
            count = -(-held // self.pages.slots)
            own.append(count if chooses else 1 << 30)
            new.append(max(entry.seen // self.pages.slots, count) - count)
        blocks = self.pages.blocks[self._rows]
        if self._chooses:
            at = torch.arange(-(-max(lengths) // self.pages.slots), device=blocks.device)[None]
            owned, skipped = self._here(own)[:, None], self._here(new)[:, None]
            blocks = blocks.gather(1, torch.where(at < owned, at, at + skipped).clamp_max(blocks.shape[1] - 1))
        return Batch(blocks, self._here(lengths).int(), max(lengths))

    def batches(self) -> list[Batch]:
        """What attention reads in each layer where sets differ: a sequence for each request and set."""
        table, entries = self._request_table, self.entries
        held = self._of_sets([entry.request.layout.held(entry.seen) for entry in entries])
        later = self._of_sets([entry.request.layout.held(entry.request.seen) for entry in entries])
        count, chooses = np.array([(entry.count, entry.layout is not None) for entry in entries]).T[..., None, None]
        lengths = np.where(chooses > 0, held + count, later)  # [n, L, S]
        at = torch.arange(-(-int(lengths.max()) // self.pages.slots), device=table.device)[None, None]
        seen = self._here([entry.seen for entry in entries])
        chosen = self._here(chooses[:, 0, 0]) > 0
        pages = self.pages.while_reading(self._rows, at, self._here(held).flatten(1), seen, chosen)
        pages = pages.unflatten(1, (table.layers, table.sets)).transpose(0, 1).flatten(1, 2).int()
        of_layers = self._here(lengths).transpose(0, 1).flatten(1).int().contiguous()  # kernels take no strides
        return [
            Batch(pages[layer, :, : -(-most // self.pages.slots)].contiguous(), of_layers[layer], most)
            for layer, most in enumerate(lengths.max(axis=(0, 2)).tolist())
        ]

    def _of_sets(self, held: Any) -> Numbers:
        return np.array(held).reshape(len(held), self._request_table.layers, self._request_table.sets)

    # ---- each layer -----------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens of a layer, `[tokens, KV heads, D]`, to their places."""
        sets = self._request_table.sets
        keys, values = (part[: self.count].reshape(self.count * sets, -1, part.shape[-1]) for part in (keys, values))
        self.pages.memory.write_new(layer, keys, values, self._places[layer])

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """These new tokens as attention has read them: rounded, where memory rounds."""
        if self.pages.memory.stored is None:
            return keys, values
        states = self.pages.memory.read_slots(layer, self._places[layer])
        keys, values = (part.view(self.count, -1, part.shape[-1]) for part in states)
        return keys, values

    def after(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> None:
        """Observe the queries of a layer, and evict, after attention.

        Args:
            query: `[tokens, query heads, D]`.
            keys, values: `[tokens, KV heads, D]`.
        """
        table = self._request_table
        observes = table.observes
        query = query.clone() if observes else query  # vLLM may write over it
        for entry in self.entries:
            own = query[entry.tokens].transpose(0, 1)[None]
            if entry.count > 1 and (observes or entry.layout is not None):
                tokens = self._with_held(entry, layer, keys, values)
                self._seen_together(entry, layer, Queries(own, tokens[0], logits), tokens)
            elif entry.count == 1 and observes:
                key = keys[entry.tokens].transpose(0, 1)[None]
                self._see_single(entry.request, layer, Queries(own, key, logits))
        if layer == table.layers - 1:
            for entry in self.entries:
                if entry.layout is not None:
                    table.give(entry.request, entry.layout)
            for request, place, kept in self._later:
                table.put(request, place, kept)
            self._later.clear()

    def _keep(self, entry: Entry, layer: int, layout: Layout, kept: Kept) -> None:
        """See `Step._keep`. Pages that a layer is given may hold tokens that a layer behind it has still to read."""
        if self.pages.own is None:
            if self._undo is not None and self._undo.is_tail(entry):
                self._undo.save_lost(entry, layer, kept)
            super()._keep(entry, layer, layout, kept)
        else:
            self._later.append((entry.request, layer, kept))
