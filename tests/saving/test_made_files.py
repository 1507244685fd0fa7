"""Calibrations as files: damaged, changed, or made to look right, they are refused by name."""

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import made_files
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction_eval import embedded


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    made_files.flip_bits(embedded.calibration_path(), load_calibration, tmp_path)


def test_made_to_look_right(tmp_path: Path) -> None:
    made_files.make_look_right(embedded.calibration_path(), load_calibration, tmp_path)


def test_files_of_before_are_refused(tmp_path: Path) -> None:
    with safe_open(embedded.calibration_path(), "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    save_file(tensors, tmp_path / "c.safetensors", metadata)
    with pytest.raises(ValueError, match=r"c\.safetensors"):
        load_calibration(tmp_path / "c.safetensors")
