"""Gates, kernels and bases as files: damaged or changed, they are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import made_files
from hf_paged_eviction_lab.fold import load_kernels
from hf_paged_eviction_lab.gate import GateLayer, Gates, load_gates, save_gates
from hf_paged_eviction_lab.low_rank.basis import Axes, Basis, LayerBasis, load_basis, save_basis

LAB = Path(__file__).parents[1] / "hf_paged_eviction_lab"
KINDS = ("fold", "basis", "gates")


def kind_of(name: str, folder: Path) -> tuple[Path, made_files.Load]:
    if name == "fold":
        return LAB / "fold" / "published" / "embedded.safetensors", load_kernels
    torch.manual_seed(0)
    if name == "gates":
        shapes = (6, 8), (6,), (2, 6), (2,)
        layers = {at: GateLayer(*(torch.randn(shape) for shape in shapes)) for at in range(2)}
        save_gates(Gates(layers, {"hidden_size": "8"}), folder / "gates.safetensors")
        return folder / "gates.safetensors", load_gates

    def axes() -> Axes:
        return Axes(torch.randn(2, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 4))

    path = folder / "basis.safetensors"
    save_basis(Basis({at: LayerBasis(axes(), axes()) for at in range(2)}, {"hidden_size": "8"}), path)
    return path, load_basis


@pytest.mark.parametrize("name", KINDS)
def test_every_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    made_files.flip_bits(*kind_of(name, tmp_path), tmp_path)
