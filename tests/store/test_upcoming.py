"""The places of the next tokens that are not rounded, worked out at once, are those that `put` finds one by one."""

import pytest
import torch

from hf_paged_eviction.store.exact import EMPTY, Exact


@pytest.mark.parametrize("seed", range(12))
def test_places_are_those_of_one_token_after_the_other(seed: int) -> None:
    """Slots of tokens that have a place, and of others; rows of different length."""
    draw = torch.Generator().manual_seed(seed)
    rows, heads, newest, first = 3, 2, 4, 2
    kind = Exact.kind(torch.zeros(rows, heads, 1, 5), torch.zeros(rows, heads, 1, 3), newest, first)
    exact = kind.change(lambda part: torch.zeros(part.shape, dtype=part.dtype))
    exact.clear()
    count = torch.randint(0, 20, (rows,), generator=draw)
    exact.count.copy_(count)
    held = torch.stack([torch.randperm(12, generator=draw)[: newest + first] for _ in range(rows * heads)])
    gone = torch.rand(held.shape, generator=draw) < 0.3
    exact.slots.copy_(held.masked_fill(gone, EMPTY).view_as(exact.slots))
    sets = 1 if seed % 2 else heads
    order = [torch.randperm(12, generator=draw)[:newest] for _ in range(rows * sets)]
    slots = torch.stack(order).view(rows, sets, newest)
    places, after = exact.upcoming(slots)
    assert places.shape == (rows, newest) and after.shape == (rows, heads, newest, newest + first)
    for at in range(newest):
        keys, values = torch.rand(rows, heads, 1, 5, generator=draw), torch.rand(rows, heads, 1, 3, generator=draw)
        exact.put(slots[..., at], keys, values, None)
        exact.counted(None)
        assert torch.equal(exact.slots, after[:, :, at]), at
        for row in range(rows):
            assert torch.equal(exact.keys[row, :, places[row, at]], keys[row, :, 0])
            assert torch.equal(exact.values[row, :, places[row, at]], values[row, :, 0])
