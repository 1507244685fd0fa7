"""Two caches that hold the same tokens."""

import torch

from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache


def same_state(one: PagedEvictionCache, other: PagedEvictionCache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for (index, a), (_, b) in zip(one.paged_layers, other.paged_layers, strict=True):
        assert torch.equal(a.positions, b.positions)
        real = a.positions >= 0
        for ours, expected in ((a.keys, b.keys), (a.values, b.values)):
            assert_close(ours[:, :, : a.held][real], expected[:, :, : b.held][real])
        assert torch.equal(one.block_table(index), other.block_table(index))
