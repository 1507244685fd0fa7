"""Files of what was fitted to a model, damaged in every way: they are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
