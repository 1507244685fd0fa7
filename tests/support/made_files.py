"""Files of what was fitted to a model, spoilt in every way: they are read, or refused by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged_eviction.naming import fitted

Load = Callable[[Path], Any]


def flip_bits(source: Path, load: Load, folder: Path) -> None:
    """Of a hundred bits all over the file, none is changed without notice."""
    image, target = source.read_bytes(), folder / "flipped.safetensors"
    target.write_bytes(image)
    load(target)
    for at in range(0, len(image), max(1, len(image) // 97)):
        flipped = bytearray(image)
        flipped[at] ^= 0x40
        target.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"flipped\.safetensors"):
            load(target)


def shapes(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor.flatten()[0].clone()
    yield tensor.flatten().clone()
    yield tensor[None].clone()
    yield tensor[..., :-1].clone()
    yield tensor[..., :0].clone()
    yield tensor[:0].clone()
    yield torch.cat([tensor, tensor[:1]])
    yield torch.full_like(tensor, torch.nan)
    yield torch.full_like(tensor, -torch.inf)
    for dtype in (torch.int64, torch.bool, torch.uint8):
        yield tensor.to(dtype)


WORDS = (
    "null",
    "7",
    "[]",
    "[1]",
    '"x"',
    "{",
    "[" * 3000,
    '{"a": ' * 3000,
    '{"hidden_size": 3}',
    '{"facts": {}}',
    "NaN",
)
NAMES = (
    "x",
    "layers",
    "layers.0",
    "layers.x.weights",
    "layers.-1.weights",
    "layers.0.",
    "layers..weights",
    "layers.0.x",
)


def make_look_right(source: Path, load: Load, folder: Path) -> None:
    """Whatever stands in it, with a digest that is right: it is read, or refused by name."""
    with safe_open(source, "pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    target = folder / "made.safetensors"

    def attempt(header: dict[str, str], parts: dict[str, Tensor], refused: bool = False) -> None:
        save_file(parts, target, {**header, "digest": fitted._digest(header, parts)})
        try:
            load(target)
        except ValueError as error:
            message = str(error)
            assert (
                message.startswith("Cannot use the ") and "made.safetensors" in message and not message.endswith(": .")
            )
        else:
            assert not refused, (header, parts)

    for name, tensor in tensors.items():
        if name.startswith("layers.0."):
            for changed in shapes(tensor):
                attempt(metadata, {**tensors, name: changed}, refused=changed.ndim != tensor.ndim)
            attempt(metadata, {other: part for other, part in tensors.items() if other != name})
    for name in NAMES:
        attempt(metadata, {**tensors, name: torch.zeros(2)}, refused=name != "layers.0.x")
    attempt(metadata, {}, refused=True)
    for key in ("model", "facts"):
        for word in WORDS:
            attempt({**metadata, key: word}, tensors, refused=word != "{}")
    for key in metadata.keys() - {"digest", "format"}:
        attempt({name: text for name, text in metadata.items() if name != key}, tensors)
