"""Budgets of heads go to the files of other projects, and come back."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_paged_eviction import export_shares, import_shares
from hf_paged_eviction.learned.calibration import load_calibration, save_calibration
from hf_paged_eviction.learned.lookup import _PUBLISHED
from hf_paged_eviction.learned.shares import HeadShares

#: 30 layers with 3 KV heads.
PROFILE = _PUBLISHED / "smollm2-135m-instruct.safetensors"


def shares(kept_share: float) -> torch.Tensor:
    table = load_calibration(PROFILE).shares
    assert table is not None
    stacked = torch.cat(table.at(torch.tensor([kept_share])))
    return stacked / stacked.mean()


def test_a_curve_says_what_each_head_loses(tmp_path: Path) -> None:
    export_shares(PROFILE, tmp_path / "curve.npy")
    curve = np.load(tmp_path / "curve.npy")
    assert curve.shape == (99, 30, 3) and curve.dtype == np.float32
    assert (curve >= 0).all() and (curve < 1).all()
    np.testing.assert_allclose(curve.mean((1, 2)), np.arange(1, 100) / 100, atol=1e-5)
    expected = shares(1 / 16)
    torch.testing.assert_close(import_shares(tmp_path / "curve.npy", kept_share=1 / 16), expected, rtol=0.05, atol=0.02)


def test_layers_that_do_not_evict_lose_nothing_in_a_curve(tmp_path: Path) -> None:
    calibration = load_calibration(PROFILE)
    layers = {index: layer for index, layer in calibration.layers.items() if index in (5, 11)}
    table = HeadShares((1.0,), {5: torch.tensor([[1.0, 2.0, 3.0]]), 11: torch.tensor([[4.0, 1.0, 1.0]])})
    save_calibration(replace(calibration, layers=layers, shares=table), tmp_path / "p.safetensors")
    export_shares(tmp_path / "p.safetensors", tmp_path / "curve.npy")
    curve = np.load(tmp_path / "curve.npy")
    assert {*np.nonzero(curve.any((0, 2)))[0]} == {5, 11}
    read = import_shares(tmp_path / "curve.npy", kept_share=0.2)
    torch.testing.assert_close(read, torch.tensor([[0.5, 1.0, 1.5], [2.0, 0.5, 0.5]]).double(), rtol=1e-4, atol=1e-4)


def test_attention_matching_gets_shares_of_the_budget(tmp_path: Path) -> None:
    export_shares(PROFILE, tmp_path / "table.json", kept_share=1 / 16, power=1.5)
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table) == 90 and sum(table.values()) == pytest.approx(1) and {"L0H0", "L29H2"} <= {*table}
    steep = shares(1 / 16) ** 1.5
    at = steep.flatten().argmin()
    assert table[f"L{at // 3}H{at % 3}"] == min(table.values())
    read = import_shares(tmp_path / "table.json")
    assert read.shape == (30, 3) and read.mean() == pytest.approx(1)


def test_tangram_gets_full_clusters_of_heads_alike(tmp_path: Path) -> None:
    export_shares(PROFILE, tmp_path / "map.npz", group=6, model="smollm2-135m-instruct")
    with np.load(tmp_path / "map.npz") as arrays:
        cluster, column, members = arrays["cluster_of"], arrays["column_of"], arrays["cluster_members"]
        score, facts = arrays["rank_score"], json.loads(bytes(arrays["meta"]))
    assert members.shape == (15, 6, 2) and len({*zip(cluster.flat, column.flat, strict=True)}) == 90
    for layer in range(30):
        for head in range(3):
            assert tuple(members[cluster[layer, head], column[layer, head]]) == (layer, head)
    means = [score[tuple(heads.T)] for heads in members]
    assert all(left.min() >= right.max() for left, right in pairwise(means))
    assert facts["page_group_size"] == 6 and facts["num_kv_heads"] == 3 and facts["cluster_scope"] == "global"
    assert import_shares(tmp_path / "map.npz").shape == (30, 3)
    with pytest.raises(ValueError, match=r"group=4.*30 x 3"):
        export_shares(PROFILE, tmp_path / "map.npz")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in.*\.npy \(a curve of LUKVPress\)"):
        export_shares(PROFILE, tmp_path / "table.csv")
    with pytest.raises(ValueError, match="kept_share"):
        export_shares(PROFILE, tmp_path / "table.json", kept_share=0)
    np.save(tmp_path / "short.npy", np.zeros((9, 30, 3)))
    with pytest.raises(ValueError, match=r"short\.npy.*\[9, 30, 3\].*\[99, layers"):
        import_shares(tmp_path / "short.npy")
    for content in ('{"L0H0": 1, "L1H1": 1}', '{"x": 1}', "[", "[1]", '{"L0H0": -1}', "{}"):
        (tmp_path / "table.json").write_text(content)
        with pytest.raises(ValueError, match=r"table\.json.*Attention Matching"):
            import_shares(tmp_path / "table.json")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("missing.npz", "broken.npz"):
        with pytest.raises(ValueError, match=f"{name}.*cluster map of Tangram"):
            import_shares(tmp_path / name)
    calibration = load_calibration(PROFILE)
    save_calibration(replace(calibration, shares=None, measured=None), tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="no budgets of heads"):
        export_shares(tmp_path / "none.safetensors", tmp_path / "table.json")
