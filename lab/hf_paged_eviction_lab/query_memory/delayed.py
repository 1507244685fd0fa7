"""Attention of queries that wait, over a memory of keys and values that is bounded (Attendre, arXiv 2401.04881)."""

from typing import Literal

import torch
from torch import Tensor

from hf_paged_eviction.internals import gather_slots, slot_index

Evict = Literal["fifo", "lra", "lfa"]

#: Weights closer to an even share than this, relatively, do not count as attention: the last bits must not decide.
_CLOSE = 1e-5


def delayed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk: int,
    queries: int,
    keys: int,
    evict: Evict = "fifo",
    real: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Attention in both directions over a text that passes in chunks.

    After each chunk has come into the memory, the queries that `queries` or more later tokens have followed attend to
    it; then the memory gives up all but `keys` tokens. At the end the queries that are left attend to what is held
    before anything more goes.

    A token counts as attended by a query of some head of its group that pays it more than an even share of what it
    sees. "lra" judges by the last such query, a new token by its own place; "lfa" by the share of such queries, one
    being added to both numbers. Of equals the older goes.

    Args:
        query: `[batch, query_heads, n, dim]`.
        key, value: `[batch, kv_heads, n, dim]`.
        chunk: tokens that come at once, counted from the first real one of each row.
        queries: tokens that must follow a query before it attends.
        keys: tokens held between chunks, in each KV head on its own.
        evict: see above.
        real: `[batch, n]` bool, False for pads; None = all real.
        scaling: of the logits; None = 1 / sqrt(dim).

    Returns:
        `[batch, query_heads, n, dim]`; zeros for pads.
    """
    count = query.shape[2]
    if real is None:
        real = torch.ones(len(query), count, dtype=torch.bool, device=query.device)
    order, lengths = (~real).long().sort(dim=-1, stable=True).indices[:, None], real.sum(-1)  # real tokens first
    memory = _HeldKeys(gather_slots(key, order), gather_slots(value, order), lengths, evict)
    groups = gather_slots(query, order).unflatten(1, (key.shape[1], -1))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # One place more, for what only fills up the width of a step.
    output = groups.new_zeros(*groups.shape[:3], count + 1, groups.shape[-1])
    left = torch.zeros_like(lengths)  # queries of each row that have attended
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        memory.take(start, stop)
        come = lengths.clamp(max=stop)
        # The rest of a row attends when the row ends.
        ready = torch.where(come == lengths, come, torch.maximum(left, come - queries))
        places = left[:, None] + torch.arange(int((ready - left).max()), device=query.device)
        counts = places < ready[:, None]
        if counts.any():
            attended = memory.attend(_at(groups, places.clamp_max(count - 1)), places, counts, scaling)
            target = torch.where(counts, places, count)[:, None, None, :, None]
            output = output.scatter(3, target.expand_as(attended), attended)
        left = ready
        memory.give_up(keys)
    packed = output[..., :count, :].flatten(1, 2)
    return torch.zeros_like(packed).scatter(2, slot_index(order, packed), packed)


def _at(groups: Tensor, places: Tensor) -> Tensor:
    index = places[:, None, None, :, None].expand(-1, *groups.shape[1:3], -1, groups.shape[-1])
    return groups.gather(3, index)


class _HeldKeys:
    """Keys and values in use, in the order of the text.

    Attributes:
        places: `[batch, kv_heads, held]` int64 of the tokens held, -1 where there is none.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, evict: Evict) -> None:
        self._all, self._lengths, self._evict = (keys, values), lengths, evict
        self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        self.places = torch.empty(*keys.shape[:2], 0, dtype=torch.int64, device=keys.device)
        self._last, self._hits, self._asked = (torch.empty_like(self.places) for _ in range(3))

    def take(self, start: int, stop: int) -> None:
        """The tokens of these places come."""
        places = torch.arange(start, stop, device=self.keys.device)
        places = torch.where(places < self._lengths[:, None], places, -1)[:, None].expand(-1, self.keys.shape[1], -1)
        self.keys, self.values = (
            torch.cat([held, states[:, :, start:stop]], dim=2)
            for held, states in zip((self.keys, self.values), self._all, strict=True)
        )
        self.places = torch.cat([self.places, places], dim=-1)
        self._last = torch.cat([self._last, places + 1], dim=-1)
        none = torch.zeros_like(places)
        self._hits, self._asked = (torch.cat([held, none], dim=-1) for held in (self._hits, self._asked))

    def attend(self, query: Tensor, places: Tensor, counts: Tensor, scaling: float) -> Tensor:
        """Queries `[batch, kv_heads, group, q, dim]` at `places` `[batch, q]`; only those that count leave a trace."""
        seen = self.places >= 0
        logits = (query @ self.keys[:, :, None].mT).float() * scaling
        logits = logits.masked_fill(~seen[:, :, None, None], float("-inf"))
        # A row of pads sees nothing; nobody looks at what it says.
        weights = logits.softmax(-1).nan_to_num(0.0)
        if self._evict != "fifo":
            even = weights * seen.sum(-1)[:, :, None, None, None]
            hit = (even > 1 + _CLOSE).any(2) & counts[:, None, :, None]
            after = torch.where(hit, (places + 1)[:, None, :, None], 0).amax(2)
            self._last = torch.maximum(self._last, after)
            self._hits = self._hits + hit.sum(2)
            self._asked = self._asked + (seen * counts.sum(-1)[:, None, None])
        return weights.to(self.values.dtype) @ self.values[:, :, None]

    def give_up(self, keys: int) -> None:
        """All but so many tokens go."""
        if self.places.shape[-1] <= keys:
            return
        if self._evict == "fifo":
            worth = self.places.double()
        elif self._evict == "lra":
            worth = self._last.double()
        else:
            worth = (self._hits + 1).double() / (self._asked + 1)
        worth = worth.masked_fill(self.places < 0, float("-inf"))
        # Later ones first, so that of equals the older goes.
        best = worth.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :keys]
        chosen = (self.places.shape[-1] - 1 - best).sort(dim=-1).values
        self.keys, self.values = gather_slots(self.keys, chosen), gather_slots(self.values, chosen)
        self.places, self._last, self._hits, self._asked = (
            part.gather(-1, chosen) for part in (self.places, self._last, self._hits, self._asked)
        )
