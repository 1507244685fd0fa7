"""Safetensors files of this package, with kind, version and a digest of everything in the metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .digests import content_digest
from .files import check_regular, whole_file

_DIGEST = "digest"


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

    def write(
        self, path: str | Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], mode: int = 0o644
    ) -> None:
        """Write a file with a digest of everything in it, whole or not at all, see `whole_file`.

        Args:
            tensors: by name, on any device.
            texts: metadata.
            mode: permissions of a new file.

        Raises:
            OSError: it cannot be written; the message names the file.
        """
        placed = {
            name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        metadata = {**self.metadata, **texts}
        with whole_file(path, mode) as temporary:
            try:
                save_file(placed, temporary, {**metadata, _DIGEST: _digest(metadata, placed)})
            except SafetensorError as error:
                raise OSError(str(error).removeprefix("Error while serializing: ")) from error

    def read(self, path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The metadata and the tensors of a file, on the CPU.

        Raises:
            ValueError: the file has another kind or version, or is not a safetensors file, or it is a folder, a pipe or
                the like; or it was changed after it was written. OSError: it cannot be read.
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
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
        except SafetensorError as error:
            raise ValueError(f"it is not a safetensors file, or it is truncated ({error})") from error
        if _DIGEST not in metadata:
            raise ValueError("it has no digest, like files of earlier versions: make it again")
        if metadata[_DIGEST] != _digest(metadata, tensors):
            raise ValueError("its digest does not match: it was damaged or changed after it was written")
        return metadata, tensors


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of everything in a file except the digest itself."""
    texts = {name: text for name, text in metadata.items() if name != _DIGEST}
    return content_digest(json.dumps(texts, sort_keys=True), tensors)
