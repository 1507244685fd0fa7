"""Digests of files, and of what stands in them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def file_digest(path: str | Path) -> str:
    """32 hexadecimal digits that tell a file's bytes from others, whatever it is called.

    Raises:
        OSError: it cannot be read.
    """
    whole = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()[:32]


def content_digest(content: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors on the CPU, every bit of them."""
    whole = hashlib.sha256(content.encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"\n{json.dumps(name)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
