"""Safetensors files of this package: which kind and version one is stands in its metadata."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


@dataclass(frozen=True)
class FileKind:
    """What the metadata of a kind of files say.

    Attributes:
        name: of the kind, such as "calibration".
        version: rises when files of the version before mean something else. None where there has been only one.
        version_key: its name in the metadata.
        remedy: what to do with a file of another version.
    """

    name: str
    version: int | None = 1
    version_key: str = "version"
    remedy: str = "make it anew"

    @property
    def metadata(self) -> dict[str, str]:
        """What every file of this kind says."""
        version = {} if self.version is None else {self.version_key: str(self.version)}
        return {"format": f"hf_paged_eviction.{self.name}", **version}

    @contextmanager
    def opened(self, path: str | Path) -> Iterator[tuple[dict[str, str], Any]]:
        """The metadata of a file, and the file, whose tensors are read by `get_tensor(name)`.

        Raises:
            ValueError: it is of another kind or version, or no such file at all. OSError: it cannot be read.
        """
        with Path(path).open("rb"):  # a missing file is no broken one
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
