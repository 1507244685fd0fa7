"""`torch.set_default_device` does not change what a cache computes: each tensor names its device."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged_eviction
import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads

#: Functions of torch that make a tensor of nothing.
MAKERS = "arange as_tensor empty eye full linspace logspace ones rand randint randn randperm tensor zeros".split()
HEADS = Heads.of([[0.4, 1.6], [1.2, 0.8]])


@pytest.mark.contract
@pytest.mark.parametrize(
    "settings",
    [
        {"allocator": "first_prompt", "policy": "snapkv"},
        {"allocator": HEADS, "policy": "keydiff", "bits": 4},
        {"allocator": "cake", "policy": "snapkv", "positions": "cache"},
        {"allocator": "ada_kv", "policy": "h2o", "bits": (3, 2)},
        {"allocator": "pyramid", "policy": "tova", "static": True},
        {"policy": "expected_attention", "recent_tokens": 8},
    ],
    ids=str,
)
def test_the_same_text(settings: dict[str, Any]) -> None:
    """With "meta" as the default device, a number that lies there by mistake cannot be read."""
    model = models.build("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([60, 45, 33], seed=1))
    texts = []
    for device in ("meta", model.device):
        with torch.device(device):
            cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
            texts.append(modes.generate(model, cache, ids, mask, 20))
    assert torch.equal(*texts)


def test_every_tensor_names_its_device() -> None:
    library, nameless = Path(hf_paged_eviction.__file__).parent, []
    for path in library.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(ast.Attribute(ast.Name("torch"), maker)) if maker in MAKERS:
                    if not {"device", None} & {keyword.arg for keyword in node.keywords}:
                        nameless.append(f"{path.relative_to(library)}:{node.lineno}")
    assert [line for line in nameless if not line.startswith("testing.py")] == []
