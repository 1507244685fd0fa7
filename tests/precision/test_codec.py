"""Rounding, packing and the matrix that mixes channels, each from its definition."""

import math

import pytest
import torch

from hf_paged_eviction.precision.codec import (
    BITS,
    Codec,
    RowStatistics,
    mixing_matrix,
    pack,
    packed_width,
    unpack,
)
from rounded import slow_round, slow_turn


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 12, 20, 64, 80, 96])
def test_the_mixing_matrix(dim: int) -> None:
    matrix = mixing_matrix(dim)
    assert torch.allclose(matrix, slow_turn(dim), atol=1e-12)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    assert matrix.abs().max() <= math.sqrt(2 / dim) + 1e-12, "every channel reaches all"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 3, 8, 20, 64])
def test_packing_loses_nothing(bits: int, dim: int) -> None:
    index = torch.randint(0, 2**bits, (2, 3, 5, dim), dtype=torch.uint8)
    packed = pack(index, bits)
    assert packed.shape == (2, 3, 5, packed_width(dim, bits))
    assert math.ceil(dim * bits / 8) <= packed.shape[-1] <= math.ceil(dim * bits / 8) + 1
    assert torch.equal(unpack(packed, bits, dim, torch.float32), index.float())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 6, 32])
def test_rounding(bits: int, dim: int, turned: bool) -> None:
    states = torch.randn(2, 3, 7, dim, dtype=torch.float64) * torch.logspace(-3, 3, 7)[:, None]
    states[0, 0, 0], states[0, 0, 1] = 0.0, 1.7
    codec = Codec(bits, turned)
    codes = codec.encode(states)
    packed, levels = codec.shapes(states, 7)
    assert (codes.packed.shape, codes.levels.shape) == (packed, levels)
    assert (codes.packed.dtype, codes.levels.dtype) == (torch.uint8, torch.bfloat16)
    decoded = codec.decode(codes, dim, states.dtype)
    assert torch.allclose(decoded, slow_round(states, bits, turned), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype: torch.dtype) -> None:
    """The result has the model's type and is off by little more than rounding and type allow."""
    states = torch.randn(1, 2, 50, 64).to(dtype)
    for bits, most in ((8, 0.01), (4, 0.11), (3, 0.22), (2, 0.4)):
        codec = Codec(bits, turned=True)
        decoded = codec.decode(codec.encode(states), 64, dtype)
        assert decoded.dtype == dtype
        assert (decoded.float() - states.float()).norm() <= most * states.float().norm()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e-5, 1.0, 1e30])
def test_numbers_of_any_size_are_rounded_alike(size: float) -> None:
    """Tiny ones have levels, too."""
    states = size * torch.randn(1, 2, 50, 64, dtype=torch.float64)
    decoded = Codec(8).decode(Codec(8).encode(states), 64, states.dtype)
    assert (decoded - states).norm() <= 0.01 * states.norm()


@pytest.mark.parametrize("bits", BITS)
def test_large_numbers_stay_finite(bits: int) -> None:
    states = torch.tensor([1e5, -1e5, 3e38, -3e38]).view(1, 1, 2, 2)
    decoded = Codec(bits).decode(Codec(bits).encode(states), 2, torch.float32)
    assert decoded.isfinite().all()


def test_without_bits_nothing_is_rounded() -> None:
    states = torch.randn(1, 1, 3, 5)
    codec = Codec(None, turned=True)
    decoded = codec.decode(codec.encode(states), 5, states.dtype)
    assert torch.equal(decoded, states)
    assert decoded.data_ptr() != states.data_ptr()


def test_sizes_are_those_of_real_tokens() -> None:
    """The fourth root of a channel's squares beside those of all channels; 16 tokens count as having them alike. Pads
    may be anything."""
    states, real = torch.randn(1, 2, 12, 6, dtype=torch.float64) * torch.tensor([9.0, 1, 1, 0, 1, 1]), torch.ones(1, 12)
    states[:, :, :2], real[:, :2] = torch.nan, 0
    codec, row = Codec(4, turned=True, centred=True), states[:, :, 2:]
    sizes_of_real = codec.sizes(states, None, real.bool()[:, None])
    shares = row.square().mean(2, keepdim=True) / row.square().mean((2, 3), keepdim=True)
    expected = ((10 * shares + 16) / 26) ** 0.25
    assert torch.equal(sizes_of_real, expected.bfloat16().double()) and torch.equal(
        sizes_of_real, codec.sizes(row, None, None)
    )
    assert torch.equal(codec.sizes(torch.zeros(1, 1, 3, 4), None, None), torch.ones(1, 1, 1, 4))
    mean = codec.mean(states, torch.arange(12)[None], real.bool()[:, None])
    assert torch.equal(mean, codec.mean(row, torch.arange(10)[None], None))


@pytest.mark.parametrize("bits", BITS)
def test_queries_that_are_small_where_keys_are_large(bits: int) -> None:
    """Products are less wrong where channels are divided by their sizes, however large all of them are."""
    scale = torch.logspace(-1, 1, 64, dtype=torch.float64)
    keys, queries = 1e20 * torch.randn(1, 1, 200, 64).double() * scale, torch.randn(50, 64).double() / scale
    codec, errors = Codec(bits, turned=True, centred=True), []
    for sizes in (torch.ones(1, 1, 1, 64), codec.sizes(keys[:, :, :100], None, None)):
        statistics = RowStatistics(torch.zeros_like(sizes), sizes), torch.empty(0)
        decoded = codec.decode(codec.encode(keys, *statistics), 64, torch.float64, *statistics)
        errors.append((queries @ (decoded - keys).mT).norm() / (queries @ keys.mT).norm())
    assert errors[1] < 0.75 * errors[0]
