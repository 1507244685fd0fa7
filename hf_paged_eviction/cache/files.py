"""Files of saved contexts: safetensors, with JSON and a digest of everything in the metadata."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..naming.digests import content_digest
from ..naming.files import shown
from ..naming.tensors import FileKind, write_tensors

#: Rises when files of the version before cannot be read any more, or its readers would misread new ones.
VERSION = 7
_KIND = FileKind("context", VERSION, remedy="save it anew, or use the version of hf_paged_eviction that wrote it")
_KEYS = frozenset({"format", "version", "content", "digest"})


def write(path: str | Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file. It appears under its name only when it is complete; on an error, an existing file stays.

    Args:
        path: a file in an existing folder.
        content: plain JSON values.
        tensors: by name, on any device.

    Raises:
        OSError: it cannot be written.
    """
    placed = _placed(tensors)
    written = json.dumps(content, sort_keys=True, allow_nan=False)
    metadata = {**_KIND.metadata, "content": written, "digest": content_digest(written, placed)}
    write_tensors(path, placed, metadata, mode=0o600)  # a context may be private


def _placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each with its own memory."""
    placed: dict[str, Tensor] = {}
    taken = set()
    for name, tensor in tensors.items():
        placed_tensor = tensor.detach().to("cpu").contiguous()
        memory = placed_tensor.untyped_storage()
        if memory.nbytes() != placed_tensor.nbytes or memory.data_ptr() in taken:
            placed_tensor = placed_tensor.clone()
        taken.add(placed_tensor.untyped_storage().data_ptr())
        placed[name] = placed_tensor
    return placed


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the content and the tensors of a file, on the CPU.

    Raises:
        ValueError: the file is not a context, has a later version, is truncated or was changed.
        OSError: there is none, or it cannot be read.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"There is no saved context {shown(path)}. PagedEvictionCache.save writes one.")
    with _KIND.opened(path) as (metadata, file):
        if set(metadata) != _KEYS:
            raise ValueError(f"its metadata lacks, or should not have, {', '.join(sorted(set(metadata) ^ _KEYS))}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    if content_digest(metadata["content"], tensors) != metadata["digest"]:
        raise ValueError("its digest does not match: it was damaged or changed after it was written")
    try:
        content = json.loads(metadata["content"])
    except RecursionError as error:
        raise ValueError("its content is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("its content is no table of values")
    return content, tensors
