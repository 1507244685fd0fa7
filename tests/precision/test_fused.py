"""What neither the Triton kernels nor the function in C read goes to torch operators, and `obstacle` says why."""

from dataclasses import replace

import pytest
import torch

from coded_cases import Case
from hf_paged_eviction.precision import fused
from hf_paged_eviction.precision.codec import Codec


class Other(Codec):
    """Of another package."""


CASE = Case(8, "cpu", dtype=torch.float32, kind="halves", key_dim=32, dim=32)
HELD, QUERY = CASE.held(), torch.zeros(CASE.rows, CASE.heads * CASE.group, 1, 32)


@pytest.mark.parametrize(
    ("held", "query", "reason"),
    [
        (HELD, QUERY, None),
        (HELD, QUERY.double(), "float32"),
        (HELD, QUERY.clone().requires_grad_(), "gradient"),
        (replace(HELD, codecs=(HELD.codecs[0], Other(4, True))), QUERY, "another package"),
        (HELD, torch.zeros(1, 1, 1, 320), "at most 256 channels"),
    ],
)
def test_says_why(held: object, query: torch.Tensor, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_missing", lambda device: None)
    obstacle = fused.obstacle(held, query)
    assert obstacle is None if reason is None else reason in obstacle


def test_without_gradients_a_query_may_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_missing", lambda device: None)
    with torch.no_grad():
        assert fused.obstacle(HELD, QUERY.clone().requires_grad_()) is None
