"""Files of saved contexts: safetensors, with JSON and a digest of everything in the metadata."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..naming.digests import content_digest
from ..naming.files import shown
from ..naming.tensors import FileKind, write_tensors

#: Rises when files of the version before cannot be read any more, or its readers would misread new ones.
VERSION = 9
_KIND = FileKind("context", VERSION, remedy="save it anew, or use the version of hf_paged_eviction that wrote it")


def write(path: str | Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file. It appears under its name only when it is complete; on an error, an existing file stays.

    Args:
        path: a file in an existing folder.
        content: plain JSON values.
        tensors: by name, on any device.

    Raises:
        OSError: it cannot be written.
    """
    placed = {
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    written = json.dumps(content, sort_keys=True, allow_nan=False)
    metadata = {**_KIND.metadata, "content": written, "digest": content_digest(written, placed)}
    write_tensors(path, placed, metadata, mode=0o600)  # a context may be private


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the content and the tensors of a file, on the CPU.

    Raises:
        ValueError: the file is not a context, has a later version, is truncated or was changed.
        OSError: there is none, or it cannot be read.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"There is no saved context {shown(path)}. PagedEvictionCache.save writes one.")
    with _KIND.opened(path) as (metadata, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    if content_digest(metadata["content"], tensors) != metadata["digest"]:
        raise ValueError("its digest does not match: it was damaged or changed after it was written")
    return json.loads(metadata["content"]), tensors
