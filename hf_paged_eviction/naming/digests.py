"""Digests of files and of their content."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def file_digest(path: str | Path) -> str:
    """Digest of the bytes of a file, 32 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    whole = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()[:32]


def content_digest(content: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of all bits of named tensors on the CPU."""
    whole = hashlib.sha256(content.encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"\n{json.dumps(name)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
