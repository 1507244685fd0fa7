"""Installing gates: hooks that can be removed, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slow_gate import random_gates

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.policies.modifiers.hybrid import Hybrid
from hf_paged_eviction_lab.gate import Gate, Gates, install_gates, load_gates, save_gates

OURS = "paged_eviction"


@pytest.fixture
def file(tmp_path: Path) -> str:
    save_gates(random_gates(models.shared("llama", OURS)), tmp_path / "g.safetensors")
    return str(tmp_path / "g.safetensors")


def answer(model: Any, policy: Any, **settings: Any) -> tuple[list[Any], PagedEvictionCache]:
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "policy": policy, **settings})
    return modes.run(model, cache, "greedy", *modes.batch("greedy", True)).tolist(), cache


def test_gates_come_and_go(file: str) -> None:
    model = models.build("llama", OURS)
    plain, _ = answer(model, "h2o")
    handle = install_gates(model, file)
    ours, _ = answer(model, Gate(file))
    assert answer(model, "h2o")[0] == plain
    handle.close()
    handle.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    with (
        install_gates(copy.deepcopy(model), load_gates(file)),
        pytest.raises(ValueError, match=r"install_gates\(model"),
    ):
        answer(model, Gate(file))
    with install_gates(model, load_gates(file)):
        assert answer(model, Gate(file))[0] == answer(copy.deepcopy(model), Gate(file))[0] == ours


def test_two_files_at_once_serve_their_own_policies(file: str) -> None:
    model, other = models.build("llama", OURS), random_gates(models.shared("llama"), seed=5)
    with install_gates(model, file):
        one = answer(model, Gate(file))[0]
        with pytest.raises(ValueError, match="same gates"):
            answer(model, Gate(other))
        with install_gates(model, other):
            assert answer(model, Gate(other))[0] != one
            assert answer(model, Gate(file))[0] == one


def test_another_model_is_refused(file: str) -> None:
    for model in (models.build("qwen2", OURS), models.build("llama", OURS, hidden_size=48)):
        for use in (install_gates, lambda model, file: PagedEvictionCache(model.config, 24, 4, policy=Gate(file))):
            with pytest.raises(ValueError, match=r"trained for.*fit-gate"):
                use(model, file)
    gates = load_gates(file)
    part = Gates({0: gates.layers[0]}, gates.model)
    with pytest.raises(ValueError, match=r"layers \[0\].*evicts in \[0, 1\]"):
        install_gates(models.build("llama", OURS), part)
    if models.unavailable("deepseek_v3") is None:
        model = models.build("deepseek_v3", OURS)
        with pytest.raises(ValueError, match="caches latents"):
            install_gates(model, replace(gates, model={}))


@pytest.mark.parametrize("name", ["nowhere.safetensors", "truncated.safetensors"])
def test_a_file_that_cannot_be_used(name: str, file: str, tmp_path: Path) -> None:
    """Flipped bits: `test_made_files.py`."""
    if name != "nowhere.safetensors":
        (tmp_path / name).write_bytes(Path(file).read_bytes()[:-100])
    with pytest.raises(ValueError, match=name):
        Gate(str(tmp_path / name))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"static": True}, "static=False"),
        ({"allocator": "cake", "heads": "shared"}, "allocator='uniform'"),
        ({"disposal": "recall"}, "queries choose the blocks"),
    ],
    ids=str,
)
def test_what_gates_cannot_be_combined_with(settings: dict[str, Any], reason: str, file: str) -> None:
    model = models.build("llama", OURS)
    with install_gates(model, file), pytest.raises(ValueError, match=reason):
        answer(model, Gate(file), **settings)


def test_inside_another_policy_a_gate_is_refused(file: str) -> None:
    model = models.build("llama", OURS)
    with install_gates(model, file), pytest.raises(ValueError, match="inside another policy"):
        answer(model, Hybrid(Gate(file), H2O()))


def test_another_attention_is_refused(file: str) -> None:
    with pytest.raises(ValueError, match="set_attn_implementation"):
        answer(models.build("llama"), Gate(file))


@pytest.mark.filterwarnings("ignore:No layer of this")
@pytest.mark.parametrize("family", [*models.FAMILIES, *models.LINEAR_AND_FULL, *models.SHARED])
def test_every_family_has_a_place_for_gates(family: str) -> None:
    """A gate scores every token that comes to a layer which evicts."""
    if models.unavailable(family) or family == "deepseek_v3":
        pytest.skip(models.unavailable(family) or "latents have no heads")
    model = models.build(family, OURS)
    ids, mask = modes.batch("greedy", False)
    plain = PagedEvictionCache(model.config, budget=24, block_size=4, policy="keydiff")
    if not plain.paged_layers:
        return
    modes.forward(model, plain, ids, mask, 0, 5)
    gates = random_gates(model, heads={index: layer.state.heads for index, layer in plain.paged_layers})
    if family in ("zamba", "zamba2"):  # one module serves several layers
        with pytest.raises(ValueError, match=r"module.*index"):
            install_gates(model, gates)
        return
    with install_gates(model, gates):
        cache = answer(model, Gate(gates))[1]
    for _, layer in cache.paged_layers:
        last = layer.table.seen - layer.table.pads - 4  # the block that is being filled is scored when it is full
        scored = (layer.positions >= 0) & (layer.positions < last[:, None, None])
        assert (layer.observed["score"][scored] > 0).all()
    assert cache.stats().evicted_tokens > 0
