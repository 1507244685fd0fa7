"""Files of what was fitted to a model: damaged, changed, or made to look right, they are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged_eviction.lab.fold.files import load_kernels
from hf_paged_eviction.lab.low_rank.basis import Basis, load_basis, save_basis
from hf_paged_eviction.lab.low_rank.codec import Axes, LayerBasis
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction.learned.gates import load_gates
from hf_paged_eviction.naming import fitted
from hf_paged_eviction_eval import embedded

Load = Callable[[Path], Any]


def a_basis(path: Path) -> Path:
    torch.manual_seed(0)

    def axes() -> Axes:
        return Axes(torch.randn(2, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 4))

    save_basis(Basis({at: LayerBasis(axes(), axes()) for at in range(2)}, {"hidden_size": "8"}), path)
    return path


def kinds(folder: Path) -> dict[str, tuple[Path, Load]]:
    return {
        "calibration": (embedded.calibration_path(), load_calibration),
        "gates": (embedded.gates_path(), load_gates),
        "fold": (embedded.kernels_path(), load_kernels),
        "basis": (a_basis(folder / "basis.safetensors"), load_basis),
    }


KINDS = ("calibration", "gates", "fold", "basis")


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_noticed(kind: str, tmp_path: Path) -> None:
    source, load = kinds(tmp_path)[kind]
    image, target = source.read_bytes(), tmp_path / "flipped.safetensors"
    target.write_bytes(image)
    load(target)
    for at in range(0, len(image), max(1, len(image) // 97)):
        flipped = bytearray(image)
        flipped[at] ^= 0x40
        target.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"Cannot use the .*flipped\.safetensors"):
            load(target)


def test_files_of_before_are_refused(tmp_path: Path) -> None:
    with safe_open(embedded.calibration_path(), "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    save_file(tensors, tmp_path / "c.safetensors", metadata)
    with pytest.raises(ValueError, match=r"c\.safetensors.*has no digest.*make it anew"):
        load_calibration(tmp_path / "c.safetensors")


def shapes(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor.flatten()[0].clone()
    yield tensor.flatten().clone()
    yield tensor[None].clone()
    yield tensor[..., :-1].clone()
    yield tensor[..., :0].clone()
    yield tensor[:0].clone()
    yield torch.cat([tensor, tensor[:1]])
    yield torch.full_like(tensor, torch.nan)
    yield torch.full_like(tensor, -torch.inf)
    for dtype in (torch.int64, torch.bool, torch.uint8):
        yield tensor.to(dtype)


WORDS = (
    "null",
    "7",
    "[]",
    "[1]",
    '"x"',
    "{",
    "[" * 3000,
    '{"a": ' * 3000,
    '{"hidden_size": 3}',
    '{"facts": {}}',
    "NaN",
)
NAMES = (
    "x",
    "layers",
    "layers.0",
    "layers.x.weights",
    "layers.-1.weights",
    "layers.0.",
    "layers..weights",
    "layers.0.x",
)


@pytest.mark.parametrize("kind", KINDS)
def test_made_to_look_right(kind: str, tmp_path: Path) -> None:
    """Whatever stands in it, with a digest that is right: it is read, or refused by name."""
    source, load = kinds(tmp_path)[kind]
    with safe_open(source, "pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    target = tmp_path / "made.safetensors"

    def attempt(said: dict[str, str], parts: dict[str, Tensor], refused: bool = False) -> None:
        save_file(parts, target, {**said, "digest": fitted._digest(said, parts)})
        try:
            load(target)
        except ValueError as error:
            told = str(error)
            assert told.startswith("Cannot use the ") and "made.safetensors" in told and not told.endswith(": .")
        else:
            assert not refused, (said, parts)

    for name, tensor in tensors.items():
        if name.startswith("layers.0."):
            for changed in shapes(tensor):
                attempt(metadata, {**tensors, name: changed}, refused=changed.ndim != tensor.ndim)
            attempt(metadata, {each: part for each, part in tensors.items() if each != name})
    for name in NAMES:
        attempt(metadata, {**tensors, name: torch.zeros(2)}, refused=name != "layers.0.x")
    attempt(metadata, {}, refused=True)
    for key in ("model", "facts"):
        for word in WORDS:
            attempt({**metadata, key: word}, tensors, refused=word != "{}")
    for key in metadata.keys() - {"digest", "format"}:
        attempt({name: text for name, text in metadata.items() if name != key}, tensors)
    assert json.loads(metadata["model"])
