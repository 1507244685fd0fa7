"""However long the text: what attention reads is the original, turned once by a whole number of positions."""

import cmath
import math

import pytest
import torch
from torch import Tensor

import models
from closeness import assert_close
from hf_paged_eviction.integration.model_rotary import layer_rotaries
from hf_paged_eviction.integration.rotary import Rotary
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.layer.parameters import Common, Place
from hf_paged_eviction.policies import make_policy
from hf_paged_eviction.table.budget import BlockBudget

MILLION = 1_000_000


def llama_rotary() -> Rotary:
    rotary = layer_rotaries(models.family_config("llama"), [0])[0]
    assert rotary is not None
    return rotary


def turned_exactly(key: list[float], positions: int) -> list[float]:
    """A key of a llama with 8 channels, base 10,000, turned in double precision."""
    half = len(key) // 2
    pairs = [
        complex(key[at], key[at + half]) * cmath.exp(1j * math.fmod(positions * _frequency(at, half), math.tau))
        for at in range(half)
    ]
    return [pair.real for pair in pairs] + [pair.imag for pair in pairs]


def _frequency(at: int, half: int) -> float:
    """As models have it: a float32 number."""
    return float(torch.tensor(10000.0) ** -(torch.tensor(at / half)))


@pytest.mark.parametrize("step", [2000, 1])
def test_a_million_tokens(step: int, request: pytest.FixtureRequest) -> None:
    if step == 1 and not request.config.getoption("--all-cases"):
        pytest.skip("minutes: runs with --all-cases")
    rotary, budget = llama_rotary(), BlockBudget.validate(64, 16, 4)
    layer = PagedLayer(budget, Common(make_policy("value_norm")), Place(rerotation=rotary))
    generator = torch.Generator().manual_seed(0)
    lasting = {0, 1, 2, 3, *range(12_345, 250_000, 12_345)}  # the sinks, and tokens with large values
    came: dict[int, Tensor] = {}
    for start in range(0, MILLION, step):
        at = torch.arange(start, start + step)
        keys = rotary.rotate(torch.randn(1, 1, step, 8, generator=generator), at).bfloat16()
        values = torch.ones_like(keys)
        for position in [p for p in lasting if start <= p < start + step]:
            values[:, :, position - start] = 100
            came[position] = keys[0, 0, position - start]
        layer.update(keys, values)
    for _ in range(40):  # single tokens, so that blocks are overwritten as well
        layer.update(keys[:, :, -1:], values[:, :, -1:])
    shown, shifts = layer.store.shown(64)[0][0, 0], layer.shifts[0, 0].tolist()
    checked = 0
    for slot, position in enumerate(layer.positions[0, 0].tolist()):
        if position in came:
            assert torch.equal(layer.keys[0, 0, slot], came[position]), "what rests is what came"
            exact = turned_exactly(came[position].tolist(), shifts[slot])
            torch.testing.assert_close(shown[slot].double(), torch.tensor(exact).double(), rtol=2**-8, atol=2**-9)
            checked += 1
    assert checked >= 6
    assert {0, 1, 2, 3} <= set(layer.positions[0, 0].tolist())
    assert min(shifts[slot] for slot, p in enumerate(layer.positions[0, 0].tolist()) if p < 4) > MILLION - 100


@pytest.mark.parametrize("offset", [1, 255, 131_071, MILLION + 1, 10 * MILLION + 1, 2**24 + 1])
def test_far_turns_are_as_exact_as_near_ones(offset: int) -> None:
    """Numbers that float32 does not hold, such as 2**24 + 1, included."""
    key = torch.randn(8, generator=torch.Generator().manual_seed(1))
    turned = llama_rotary().rotate_by(key, torch.tensor(offset))
    expected = torch.tensor(turned_exactly(key.tolist(), offset))
    assert_close(turned, expected, share=4e-6)
    assert torch.equal(llama_rotary().rotate_by(key, torch.tensor(0)), key)
