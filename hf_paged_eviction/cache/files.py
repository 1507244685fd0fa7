"""Files of saved contexts: tensors, and everything else as JSON in the metadata."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..naming.files import shown
from ..naming.tensors import FileKind
from ..tensors.saved import put_together, take_apart

#: Rises when files of the version before cannot be read any more, or its readers would misread new ones.
VERSION = 10
_KIND = FileKind("context", VERSION, remedy="save it anew, or use the version of hf_paged_eviction that wrote it")


def write(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write plain values and tensors, see `take_apart`. The file appears under its name only when it is complete; on an
    error, an existing file stays.

    Raises:
        OSError: it cannot be written. TypeError: a value is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(take_apart(content, tensors), sort_keys=True, allow_nan=False)
    _KIND.write(path, tensors, {"content": text}, mode=0o600)  # a context may be private


def read(path: str | Path) -> dict[str, Any]:
    """Read what `write` was given, with tensors on the CPU, see `put_together`.

    Raises:
        ValueError: the file is not a context, has a later version, is truncated or was changed.
        OSError: there is none, or it cannot be read.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"There is no saved context {shown(path)}. PagedEvictionCache.save writes one.")
    metadata, tensors = _KIND.read(path)
    return put_together(metadata["content"], tensors)  # type: ignore[no-any-return]
