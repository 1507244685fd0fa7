"""Files that were fitted to a model: tensors by layer, and the model in the metadata."""

import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from .files import existing_file
from .tensors import FileKind

T = TypeVar("T")
#: By layer, and by name.
Tensors = Mapping[int, Mapping[str, Tensor]]
#: Nanoseconds within which two writes of a file may get the same time: far more than a tick of any kernel's clock.
_TICK = 10**8
#: Errors of reading a file of another kind.
_UNREADABLE = (OSError, LookupError, TypeError, ValueError)


class FittedFiles(Generic[T]):
    """The files of one kind.

    Args:
        kind: its name and version.
        made_by: the command that writes such files.
        make: makes the object from the tensors and the metadata, in which "model" and "facts" are dictionaries and
            "path" is the file. It raises ValueError, KeyError or TypeError if they do not fit together.
        called: name of the kind in messages, if it is not `kind.name`.
    """

    def __init__(
        self, kind: FileKind, made_by: str, make: Callable[[Tensors, dict[str, Any]], T], called: str = ""
    ) -> None:
        self._kind = kind
        self._made_by = made_by
        self._make = make
        self._called = called or kind.name
        self._cached = lru_cache(maxsize=8)(self._read)

    def save(
        self, path: str | Path, layers: Tensors, model: Mapping[str, str], facts: Mapping[str, str], **more: str
    ) -> None:
        """Write a file, whole or not at all, which `load` reads back bit by bit.

        Args:
            layers: tensors of each layer, by its index in the model.
            model: see `model_fingerprint`.
            facts: facts about the fit.
            more: additional metadata.

        Raises:
            OSError: the file cannot be written.
        """
        tensors = {
            f"layers.{index}.{name}": tensor for index, layer in layers.items() for name, tensor in layer.items()
        }
        texts = {"model": json.dumps(dict(model)), "facts": json.dumps(dict(facts))}
        self._kind.write(path, tensors, {**texts, **more})

    def load(self, path: str | Path) -> T:
        """Read a file. The result is cached until the file changes.

        Raises:
            ValueError: the file does not exist, has another kind or version, or was changed after it was written.
        """
        path = existing_file(path, self._called, self._made_by)
        status = path.stat()
        changed = status.st_ctime_ns  # the time of the inode, which cannot be set back
        if time.time_ns() - changed < _TICK:
            return self._read(path)  # a later write could have the same time
        return self._cached(path, changed, status.st_size)

    def _read(self, path: Path, *state: int) -> T:
        try:
            metadata, tensors = self._kind.read(path)
            texts = {name: json.loads(metadata[name]) for name in ("model", "facts")}
            return self._make(_by_layer(tensors), {**metadata, **texts, "path": path})
        except _UNREADABLE as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).removesuffix(".")
            raise ValueError(f"Cannot use the {self._called} {str(path)!r}: {reason}.") from error


def _by_layer(tensors: Mapping[str, Tensor]) -> Tensors:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, index, part = name.split(".", 2)
        layers.setdefault(int(index), {})[part] = tensor
    return dict(sorted(layers.items()))
