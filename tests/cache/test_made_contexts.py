"""Saved contexts of all kinds with something changed in them: refused with a `ValueError` that names the file, or of
use."""

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

import made_contexts
import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.cache import files

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "observing": ("llama", {"policy": "h2o"}),
    "cake": ("llama", {"policy": "cake", "allocator": "cake"}),
    "ada_kv": ("llama", {"policy": "snapkv", "allocator": "ada_kv", "heads": "separate"}),
    "d2o": ("llama", {"policy": "h2o", "allocator": "d2o"}),
    "protect": ("llama", {"protect": [(6, 9), (20, 22)], "budget": 48}),
    "protect in rows": ("llama", {"protect": [[(6, 9)], [(3, 5)], []], "budget": 48}),
    "bits": ("llama", {"bits": (4, 8)}),
    "bits by head": ("llama", {"bits": 2, "heads": "separate"}),
    "bits in shares": ("llama", {"bits": 4, "policy": "snapkv", "allocator": "ada_kv"}),
    "latents in bits": ("deepseek_v3", {"bits": 4, "policy": "keydiff"}),
    "in the cache": ("llama", {"positions": "cache"}),
    "static": ("llama", {"static": True, "policy": "snapkv(window=4)"}),
    "static in bits": ("llama", {"static": True, "bits": 8}),
    "linear": ("falcon_h1", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_name_or_of_use(kind: str, tmp_path: Path) -> None:
    family, settings = KINDS[kind]
    if models.unavailable(family):
        pytest.skip(f"this transformers release has no {family}")
    model = models.shared(family, "sdpa" if family == "deepseek_v3" else "paged_eviction")
    cache = models.paged(model.config, **{"budget": 24, "block_size": 4, **settings})
    ids, mask = modes.batch("greedy", padded=family != "falcon_h1")
    modes.forward(model, cache, ids, mask, 0, 35)
    for at in range(35, 38):
        modes.forward(model, cache, ids, mask, at, at + 1)
    path = tmp_path / "context.safetensors"
    cache.save(path, ids[:, :38])
    content, tensors = files.read(path)
    draw, refused = Random(kind), 0
    for _ in range(24):
        what, *changed = made_contexts.changed(draw, content, tensors)
        files.write(path, *changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = PagedEvictionCache.load(path, model.config)
        except ValueError as error:
            assert "Cannot use the saved context" in str(error) and "context.safetensors" in str(error), (what, error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}") from error
        else:
            _use(model, loaded, what, ids, mask)
    assert refused >= 12


def _use(model: Any, cache: Any, what: str, *inputs: Any) -> None:
    """Where text and pads agree, nothing else is wrong."""
    try:
        for start, stop in ((38, 39), (39, 40)):
            modes.forward(model, cache, *inputs, start, stop)
        repr(cache)
    except ValueError:
        pass
    except Exception as error:
        raise AssertionError(f"{what}, and then {type(error).__name__}: {error}") from error
