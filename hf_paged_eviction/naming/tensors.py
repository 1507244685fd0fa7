"""Safetensors files of this package, with kind and version in the metadata."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .files import check_regular, whole_file


@dataclass(frozen=True)
class FileKind:
    """A kind of files.

    Attributes:
        name: name of the kind, such as "calibration".
        version: number that rises when older files would be misread; None if there is only one version.
        version_key: key of the version in the metadata.
        remedy: what to do with a file of another version.
    """

    name: str
    version: int | None = 1
    version_key: str = "version"
    remedy: str = "make it anew"

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of every file of this kind."""
        version = {} if self.version is None else {self.version_key: str(self.version)}
        return {"format": f"hf_paged_eviction.{self.name}", **version}

    @contextmanager
    def opened(self, path: str | Path) -> Iterator[tuple[dict[str, str], Any]]:
        """Context manager: the metadata of a file, and the open file, whose tensors `get_tensor(name)` reads.

        Raises:
            ValueError: the file has another kind or version, or is not a safetensors file, or it is a folder, a pipe or
                the like. OSError: it cannot be read.
        """
        check_regular(path)
        with Path(path).open("rb"):  # one that may not be read is not a damaged one
            pass
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != self.metadata["format"]:
                    raise ValueError(f"it is another kind of safetensors file, not a {self.name}")
                version = metadata.get(self.version_key)
                if self.version is not None and version != str(self.version):
                    raise ValueError(
                        f"it is of version {version!r}, this package reads version {self.version}: {self.remedy}"
                    )
                yield metadata, file
        except SafetensorError as error:
            raise ValueError(f"it is not a safetensors file, or it is truncated ({error})") from error


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], mode: int = 0o644
) -> None:
    """Write a safetensors file, whole or not at all, see `whole_file`.

    Args:
        tensors: by name, contiguous on the CPU.

    Raises:
        OSError: it cannot be written; the message names the file.
    """
    with whole_file(path, mode) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error).removeprefix("Error while serializing: ")) from error
