"""A disposal that writes down what leaves, and a check that nothing is forgotten or let go twice."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import Disposal
from hf_paged_eviction.disposals import EvictionAction, Held, Site
from hf_paged_eviction.table.table import BlockTable

MOST = 256  # positions that a test may use


@dataclass
class Log:
    """What has left, by position. Rows first.

    Attributes:
        times: `[B, S, MOST]` how often.
        call: `[B, S, MOST]` which call of `evict_token` it was.
        keys, values: `[B, H, MOST, D]`.
        planned: `[B, S, MOST]` how often the token was in a block that was chosen.
        calls: `[B]` so far.
    """

    times: Tensor
    call: Tensor
    keys: Tensor
    values: Tensor
    planned: Tensor
    calls: Tensor


class WitnessAction(EvictionAction):
    """Notes everything in tensors of its own."""

    acts = True
    STATE = ("log",)

    def __init__(self) -> None:
        self.log: Log | None = None

    def _ready(self, held: Held) -> Log:
        if self.log is None:
            rows, sets, _ = held.positions.shape
            _, heads, _, width = held.keys.shape
            make = lambda *shape, dtype=torch.int64: torch.zeros((rows, *shape), dtype=dtype)  # noqa: E731
            sizes = [(width, held.keys.dtype), (held.values.shape[-1], held.values.dtype)]
            states = [make(heads, MOST + 1, dim, dtype=dtype) for dim, dtype in sizes]
            numbers = [make(sets, MOST + 1) for _ in range(3)]
            self.log = Log(numbers[0], numbers[1], *states, numbers[2], make())
        return self.log

    def plan(self, slots: Tensor, begins: Tensor, held: Held) -> None:
        log = self._ready(held)
        chosen = held.positions.expand(-1, slots.shape[1], -1).gather(-1, slots)
        index = chosen.masked_fill(~begins[..., None] | (chosen < 0), MOST)
        log.planned.scatter_add_(-1, index, torch.ones_like(index))

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        log = self._ready(leaving) if self.log is None else self.log
        index = torch.where(leaving.positions < 0, MOST, leaving.positions)
        log.calls.add_(1)
        log.times.scatter_add_(-1, index, torch.ones_like(index))
        log.call.scatter_(-1, index, log.calls[:, None, None].expand_as(index))
        for target, states in ((log.keys, leaving.keys), (log.values, leaving.values)):
            target.scatter_(2, index[..., None].expand(*states.shape[:3], states.shape[-1]), states.detach())

    def start(self, table: BlockTable | None) -> None:
        self.log = None

    def left(self, row: int, head: int) -> list[int]:
        """Positions that have left, in the order in which they went."""
        if self.log is None:
            return []
        own = head if self.log.times.shape[1] > 1 else 0
        times, call = self.log.times[row, own, :MOST].tolist(), self.log.call[row, own].tolist()
        assert max(times) <= 1, "a token left twice"
        return sorted((at for at in range(MOST) if times[at]), key=lambda at: (call[at], at))


@dataclass(frozen=True)
class Witness(Disposal):
    """Writes down what leaves."""

    name = "witness"

    def action(self, site: Site) -> WitnessAction:
        return WitnessAction()


def check_all_told(layer: Any, fed: list[list[tuple[Tensor, Tensor]]]) -> int:
    """Everything that came and is not held has left, once, with the bytes it had; returns how many have.

    Args:
        fed: `[row][position]` key and value `[H, D]` of each real token that was taken in.
    """
    count = 0
    for row, tokens in enumerate(fed):
        for head in range(layer.keys.shape[1]):
            held = {position for position in layer.positions[row, head].tolist() if position >= 0}
            left = layer.action.left(row, head)
            assert not held & set(left), "a token is held and has left"
            assert held | set(left) == set(range(len(tokens))), "a token is lost"
            for position in left:
                key, value = tokens[position]
                assert torch.equal(layer.action.log.keys[row, head, position], key[head])
                assert torch.equal(layer.action.log.values[row, head, position], value[head])
            count += len(left)
    return count
