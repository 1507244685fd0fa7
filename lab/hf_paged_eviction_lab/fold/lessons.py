"""What a layer's queries would read in a state of folded tokens, played on the full cache of a window of text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import HookedCache, Logits, Part, Queries, QueryHook, Read, feed, join, read

#: Queries of a window that are learned from.
_QUERIES = 256
#: Tokens of a forward behind the first.
_CHUNK = 64


@dataclass(frozen=True)
class Lesson:
    """What one layer should say to some queries of a window. One row.

    Attributes:
        queries: `[1, Q, q, D]`.
        keys, values: `[1, H, n, D]` of the tokens that leave at some time.
        folded: `[1, H, q, n]` bool, which of them have left before the query's forward.
        held: attention to the tokens that are held.
        target: `[1, Q, q, D]`, attention to all.
        logits: of the model.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    folded: Tensor
    held: Read
    target: Tensor
    logits: Logits

    @property
    def bytes(self) -> int:
        tensors = (self.queries, self.keys, self.values, self.folded, self.held.output, self.held.lse, self.target)
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Eviction:
    """Whose losers are folded.

    Attributes:
        policy, heads: of the cache.
        budgets: in tokens; the windows take turns.
        block_size: of the cache.
    """

    policy: str
    heads: str
    budgets: tuple[int, ...]
    block_size: int = 16

    def cache(self, config: Any, turn: int) -> PagedEvictionCache:
        """A cache that evicts so."""
        budget = self.budgets[turn % len(self.budgets)]
        return PagedEvictionCache(config, budget, self.block_size, self.policy, self.heads)  # type: ignore[arg-type]


def spans(length: int, turn: int) -> list[tuple[int, int]]:
    """The forwards of a window: a prompt of a quarter, a half or three quarters of it, then chunks."""
    first = length * (1 + turn % 3) // 4
    starts = [0, *range(first, length, _CHUNK)]
    return list(zip(starts, [*starts[1:], length], strict=True))


class _Player(QueryHook):
    """Plays the evictions of one layer on the keys, values and queries of a full forward."""

    def __init__(self, layer_idx: int, paged: Any, turn: int, visit: Callable[[int, Lesson], None]) -> None:
        super().__init__(layer_idx)
        self.layer: Any = None
        self._paged, self._turn, self._visit = paged, turn, visit

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        lesson = play(self._paged, queries, self.layer.keys, self.layer.values, self._turn)
        if lesson is not None:
            self._visit(self.layer_idx, lesson)


def play(paged: Any, queries: Queries, keys: Tensor, values: Tensor, turn: int) -> Lesson | None:
    """Feed a window to an empty layer and note which token leaves when; None if none does."""
    length = keys.shape[2]
    never = length + 1
    leaves = torch.full((1, keys.shape[1], length), never, device=keys.device)
    turn_of = torch.zeros(length, dtype=torch.int64, device=keys.device)
    for number, (start, stop) in enumerate(spans(length, turn)):
        turn_of[start:stop] = number
        all_keys, _ = paged.update(keys[:, :, start:stop], values[:, :, start:stop])
        if paged.recorder is not None:
            paged.attended(Queries(queries.query[:, :, start:stop], all_keys, queries.logits))
        held = torch.zeros_like(leaves, dtype=torch.bool).scatter(-1, paged.positions, True)
        gone = ~held & (torch.arange(length, device=keys.device) < stop) & (leaves == never)
        leaves = leaves.masked_fill(gone, number)
    folded = leaves[:, :, None] < turn_of[:, None]
    some = folded.any(-1).all(1)[0].nonzero()[:, 0]
    if not len(some):
        return None
    some = some[torch.linspace(0, len(some) - 1, min(_QUERIES, len(some)), device=some.device).long()]
    asking, folded = queries.query[:, :, some], folded[:, :, some]
    later = torch.arange(length, device=keys.device) > some[:, None]
    hidden = torch.where(later, float("-inf"), 0.0)[None, None]
    full = read(asking, Part(keys, values, hidden), queries.logits)
    held_read = read(asking, Part(keys, values, hidden.masked_fill(folded, float("-inf"))), queries.logits)
    ever = folded.any(2).any(1)[0]
    target = join([full], queries.logits)
    with torch.inference_mode(False):  # for good, so that something can be learned from it
        sinks = queries.logits.sinks
        logits = Logits(
            queries.logits.scaling, queries.logits.softcap, None if sinks is None else sinks.detach().clone()
        )
        wanted = (asking, keys[:, :, ever], values[:, :, ever])
        asking, keys, values = (states.detach().float().clone() for states in wanted)
        return Lesson(
            *(asking, keys, values, folded[..., ever].clone()),
            Read(held_read.output.detach().clone(), held_read.lse.detach().clone()),
            target.detach().clone(),
            logits,
        )


def lessons(
    model: Any,
    tokens: Tensor,
    eviction: Eviction,
    turn: int,
    layers: Sequence[int],
    visit: Callable[[int, Lesson], None],
) -> None:
    """Let the model read a window `[1, length]` with its full cache and visit some of its layers.

    Args:
        model: with the attention implementation "paged_eviction".
        turn: number of the window.
    """
    cache = eviction.cache(model.config, turn)
    paged = dict(cache.paged_layers)
    players: Mapping[int, _Player] = {index: _Player(index, paged[index], turn, visit) for index in layers}
    overheard = HookedCache(model.config, players)
    for index, player in players.items():
        player.layer = overheard.layers[index]
    with torch.inference_mode():
        feed(model, tokens, None, overheard)
