"""Calibrations as files: damaged or changed, they are refused by name."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import made_files
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction.naming.fitted import FittedFiles
from hf_paged_eviction.naming.tensors import FileKind
from hf_paged_eviction_eval import embedded


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    made_files.flip_bits(embedded.calibration_path(), load_calibration, tmp_path)


def test_files_of_before_are_refused(tmp_path: Path) -> None:
    with safe_open(embedded.calibration_path(), "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    save_file(tensors, tmp_path / "c.safetensors", metadata)
    with pytest.raises(ValueError, match=r"c\.safetensors"):
        load_calibration(tmp_path / "c.safetensors")


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """Also where its time and size do not show it: two writes in the same tick of the clock, or a time set back."""
    path = tmp_path / "numbers.safetensors"
    files = FittedFiles(FileKind("numbers"), "x", lambda layers, header: layers[0]["at"])
    for number in range(5):
        files.save(path, {0: {"at": torch.tensor(number)}}, {}, {})
        os.utime(path, ns=(0, 0))
        assert int(files.load(path)) == number
