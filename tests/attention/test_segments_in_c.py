"""The function in C for keys and values in segments says what torch says, again and again with one prepared call."""

import copy
import pickle

import pytest
import torch

from closeness import assert_close
from hf_paged_eviction.attention.segments import InSegments, Prepared, SegmentsReader
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.cpu.library import missing
from hf_paged_eviction.store.segments import Segments

compiled = pytest.mark.skipif(missing() is not None, reason=str(missing()))
CASES = [(16, 16, 1), (64, 64, 3), (128, 128, 2), (80, 24, 4)]


def held_of(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[InSegments, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(key_dim)
    lengths = torch.tensor([[1, 64, 130], [63, 5, 200]])
    layout = Segments(lengths, torch.device("cpu"), 200)
    keys, values = (torch.randn(layout.total, dim).to(dtype) for dim in (key_dim, value_dim))
    return InSegments(keys, values, layout.lengths), layout.bounds


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", CASES, ids=str)
def test_it_says_what_torch_says(dims: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also when keys, values and queries have changed since the call was prepared."""
    (key_dim, value_dim, group), logits = dims, Logits(0.3)
    held, bounds = held_of(key_dim, value_dim, dtype)
    reader = SegmentsReader(held, bounds)
    for _ in range(3):
        query = torch.randn(2, 3 * group, 1, key_dim).to(dtype)
        output = reader(query, None, logits)
        assert isinstance(reader._prepared, Prepared) and output.dtype == dtype
        wide = InSegments(held.keys.double(), held.values.double(), held.lengths)
        share = 1e-5 if dtype == torch.float32 else 1e-2
        assert_close(output.double(), wide.read(query.double(), None, logits), share=share)
        held.keys.normal_(), held.values.normal_()


@compiled
@pytest.mark.parametrize("sets", [1, 3], ids=["shared", "separate"])
def test_room_left_is_not_read(sets: int) -> None:
    """Rows and heads fill their lowest slots last; what lies there may be no number. What is visible changes."""
    limits = torch.tensor([[1, 64, 130], [63, 5, 200]])[:, -sets:]
    layout = Segments(limits.expand(2, 3), torch.device("cpu"), 200)
    keys, values, slots = torch.randn(layout.total, 16), torch.randn(layout.total, 16), torch.arange(200)
    visible = torch.zeros(2, sets, 200, dtype=torch.bool)
    reader = SegmentsReader(held := InSegments(keys, values, layout.lengths, visible), layout.bounds)
    for share in (1.0, 0.6, 0.1):
        left = ((limits - 1) * share).long()
        visible.copy_((slots >= left[..., None]) & (slots < limits[..., None]))
        query, logits = torch.randn(2, 6, 1, 16), Logits(0.3)
        expected = held.read(query, None, logits)
        for start, gone in zip(layout.bounds[0].flatten(), left.expand(2, 3).flatten(), strict=True):
            keys[start : start + gone] = values[start : start + gone] = float("nan")
        assert_close(reader(query, None, logits), expected, share=1e-5)
        assert isinstance(reader._prepared, Prepared)
        keys.nan_to_num_(), values.nan_to_num_()


@compiled
def test_large_logits_stay_finite() -> None:
    held, bounds = held_of(64, 64, torch.float32)
    held.keys.mul_(1e3)
    query, logits = torch.randn(2, 3, 1, 64) * 1e3, Logits(1.0)
    output = SegmentsReader(held, bounds)(query, None, logits)
    assert_close(output, held.read(query, None, logits))


@compiled
@pytest.mark.parametrize("logits", [Logits(0.3, 2.0), Logits(0.3, None, torch.ones(3))], ids=["softcap", "sinks"])
def test_torch_reads_what_it_does_not_know(logits: Logits) -> None:
    held, bounds = held_of(16, 16, torch.float32)
    reader, query = SegmentsReader(held, bounds), torch.randn(2, 3, 1, 16)
    assert torch.equal(reader(query, None, logits), held.read(query, None, logits))
    reader(query, None, Logits(0.3))
    assert torch.equal(reader(query, None, logits), held.read(query, None, logits))
    grown = query.clone().requires_grad_()
    reader(grown, None, Logits(0.3)).sum().backward()
    assert grown.grad is not None and grown.grad.abs().sum() > 0


@compiled
def test_another_batch_or_scale_is_prepared_anew() -> None:
    held, bounds = held_of(16, 16, torch.float32)
    reader = SegmentsReader(held, bounds)
    for group, scale in ((1, 0.3), (2, 0.3), (2, 0.7), (1, 0.3)):
        query = torch.randn(2, 3 * group, 1, 16)
        assert_close(reader(query, None, Logits(scale)), held.read(query, None, Logits(scale)), share=1e-5)


@compiled
def test_a_copy_reads_its_own_segments() -> None:
    """Addresses are not copied."""
    held, bounds = held_of(16, 16, torch.float32)
    reader, query, logits = SegmentsReader(held, bounds), torch.randn(2, 3, 1, 16), Logits(0.3)
    before = reader(query, None, logits)
    for other in (copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))):
        held.keys.zero_()
        assert torch.equal(other(query, None, logits), before)
        held.keys.copy_(other._held.keys)
