"""Files of what was fitted to a model stay in memory for as long as they are the same."""

import os
from pathlib import Path

import torch

from hf_paged_eviction.naming.files import NamedFiles
from hf_paged_eviction.naming.fitted import FittedFiles
from hf_paged_eviction.naming.tensors import FileKind


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """Also where its time and size do not show it: two writes in the same tick of the clock, or a time set back."""
    path = tmp_path / "numbers.safetensors"
    files = FittedFiles(FileKind("numbers"), NamedFiles("No numbers", "x", "x"), lambda layers, header: layers[0]["at"])
    for number in range(5):
        files.save(path, {0: {"at": torch.tensor(number)}}, {}, {})
        os.utime(path, ns=(0, 0))
        assert int(files.load(path)) == number
