"""Files of what was fitted to a model: tensors of its layers, and in the metadata what they belong to."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from .files import NamedFiles
from .tensors import FileKind

T = TypeVar("T")
#: By layer, and by name.
Tensors = Mapping[int, Mapping[str, Tensor]]


class FittedFiles(Generic[T]):
    """The files of one kind.

    Args:
        kind: its name and version.
        names: where they are found.
        make: of the tensors and the metadata, in which "model" and "facts" are dictionaries and "path" is the file.
            Raises ValueError, KeyError or TypeError where they do not fit together.
        called: the kind as messages call it, if not by its name.
    """

    def __init__(
        self, kind: FileKind, names: NamedFiles, make: Callable[[Tensors, dict[str, Any]], T], called: str = ""
    ) -> None:
        self.names = names
        self._kind = kind
        self._make = make
        self._called = called or kind.name
        self._cached = lru_cache(maxsize=8)(self._read)

    def save(
        self, path: str | Path, layers: Tensors, model: Mapping[str, str], facts: Mapping[str, str], **more: str
    ) -> None:
        """Write a file, which `load` reads back bit by bit.

        Args:
            layers: the tensors of each, by its index in the model.
            model: see `fingerprint`.
            facts: what it was fitted to, and how well.
            more: metadata besides.
        """
        tensors = {
            f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
            for index, layer in layers.items()
            for name, tensor in layer.items()
        }
        said = {"model": json.dumps(dict(model)), "facts": json.dumps(dict(facts))}
        save_file(tensors, path, {**self._kind.metadata, **said, **more})
        Path(path).chmod(0o644)  # it is written as a private file

    def load(self, name: str | Path) -> T:
        """Read a file; it stays in memory for as long as it is the same.

        Args:
            name: a file, a name given to one or, where this kind has one on the Hugging Face Hub, `organisation/name`.

        Raises:
            ValueError: it does not exist, or is not of this kind and version.
        """
        path = self.names.find(str(name))
        status = path.stat()
        return self._cached(path, status.st_mtime_ns, status.st_size)

    def _read(self, path: Path, modified: int, size: int) -> T:
        layers: dict[int, dict[str, Tensor]] = {}
        try:
            with self._kind.opened(path) as (metadata, file):
                for name in file.keys():  # noqa: SIM118 - no dictionary
                    _, index, part = name.split(".", 2)
                    layers.setdefault(int(index), {})[part] = file.get_tensor(name)
            if not layers:
                raise ValueError("it holds no layer")
            said = {"model": json.loads(metadata["model"]), "facts": json.loads(metadata["facts"])}
            return self._make(dict(sorted(layers.items())), {**metadata, **said, "path": path})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Cannot use the {self._called} {str(path)!r}: {error}.") from error
