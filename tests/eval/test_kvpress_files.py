"""Budgets of heads in the form of kvpress, which another environment reads."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction.learned.lookup import _PUBLISHED
from hf_paged_eviction.learned.shares import HeadShares

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: 30 layers with 3 KV heads.
PROFILE = _PUBLISHED / "smollm2-135m-instruct.safetensors"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kvpress_files")


def test_a_curve_says_what_each_head_loses(files: Any) -> None:
    calibration = load_calibration(PROFILE)
    curve = files.curve_of(calibration, power=1.0)
    assert curve.shape == (99, 30, 3) and curve.dtype == np.float32
    assert (curve >= 0).all() and (curve < 1).all()
    np.testing.assert_allclose(curve.mean((1, 2)), np.arange(1, 100) / 100, atol=1e-5)
    assert calibration.shares is not None
    shares = torch.cat(calibration.shares.at(torch.tensor([0.06])))
    kept = torch.from_numpy(1 - curve[93]).double()  # 94 % are pruned
    torch.testing.assert_close(kept / kept.mean(), shares / shares.mean(), rtol=0.05, atol=0.02)


def test_layers_that_do_not_evict_lose_nothing(files: Any) -> None:
    calibration = load_calibration(PROFILE)
    table = HeadShares((1.0,), {5: torch.tensor([[1.0, 2.0, 3.0]]), 11: torch.tensor([[4.0, 1.0, 1.0]])})
    layers = {index: layer for index, layer in calibration.layers.items() if index in (5, 11)}
    curve = files.curve_of(replace(calibration, layers=layers, shares=table))
    assert {*np.nonzero(curve.any((0, 2)))[0]} == {5, 11}


def test_a_profile_without_budgets_is_refused(files: Any) -> None:
    with pytest.raises(ValueError, match="no budgets of heads"):
        files.curve_of(replace(load_calibration(PROFILE), shares=None))


def test_what_runs_kvpress_does_without_this_package() -> None:
    """kvpress needs a release of transformers that this package no longer supports."""
    for name in ("kvpress_harness", "peers"):
        text = (BENCHMARKS / f"{name}.py").read_text("utf-8")
        assert "kvpress" in text and "import hf_paged_eviction" not in text and "from hf_paged_eviction" not in text
