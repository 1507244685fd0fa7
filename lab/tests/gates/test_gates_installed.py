"""Installing gates: hooks that can be taken out, what is refused, and compiled decode steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_gate import random_gates

import models
import modes
from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.policies.modifiers.hybrid import Hybrid
from hf_paged_eviction.testing import check_policy
from hf_paged_eviction_lab.gates import Gate, GateLayer, Gates, install_gates, load_gates, save_gates

OURS = "paged_eviction"


@pytest.fixture
def file(tmp_path: Path) -> str:
    save_gates(random_gates(models.build("llama")), tmp_path / "g.safetensors")
    return str(tmp_path / "g.safetensors")


def answer(model: Any, policy: Any, **settings: Any) -> tuple[list[Any], PagedEvictionCache]:
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "policy": policy, **settings})
    return modes.run(model, cache, "greedy", *modes.batch("greedy", True)).tolist(), cache


def test_gates_come_and_go(file: str) -> None:
    model = models.build("llama")
    before = copy.deepcopy(vars(model))
    plain, _ = answer(model, "keydiff")
    handle = install_gates(model, file)
    ours, _ = answer(model, f"gate:{file}")
    assert answer(model, "keydiff")[0] == plain
    handle.close()
    handle.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert vars(model).keys() == before.keys()
    with install_gates(model, load_gates(file)):
        assert answer(model, f"gate:{file}")[0] == ours
    with pytest.raises(RuntimeError, match=r"0.*install_gates\(model"):
        answer(model, f"gate:{file}")


def test_two_files_at_once_serve_their_own_policies(file: str, tmp_path: Path) -> None:
    model = models.build("llama")
    save_gates(random_gates(model, seed=5), tmp_path / "other.safetensors")
    with install_gates(model, file):
        one = answer(model, f"gate:{file}")[0]
        with pytest.raises(RuntimeError, match="same file"):
            answer(model, f"gate:{tmp_path / 'other.safetensors'}")
        with install_gates(model, tmp_path / "other.safetensors"):
            other = answer(model, f"gate:{tmp_path / 'other.safetensors'}")[0]
            assert answer(model, f"gate:{file}")[0] == one
    assert one != other
    with pytest.raises(ValueError, match="sources"):
        answer(model, Hybrid(Gate(file), Gate(str(tmp_path / "other.safetensors"))))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen2", "model_type qwen2"),
        ("deepseek_v3", "another model"),
    ],
)
def test_another_model_is_refused(family: str, reason: str, file: str) -> None:
    if models.unavailable(family):
        pytest.skip(models.unavailable(family))
    with pytest.raises(ValueError, match=reason):
        install_gates(models.build(family), file)
    with pytest.raises(ValueError, match=reason):
        PagedEvictionCache(models.build(family).config, budget=24, block_size=4, policy=f"gate:{file}")


def test_gates_without_a_fingerprint_meet_their_match(tmp_path: Path) -> None:
    """Shapes are looked at again where states come."""
    model = models.build("llama")
    with pytest.raises(ValueError, match=r"evicts.*\[7\]"):
        install_gates(model, Gates({7: GateLayer(torch.zeros(2, 32), torch.zeros(2))}, {}))
    for heads, hidden, reason in ((2, 31, "hidden states of 31 numbers"), (3, 32, "2 KV heads"), (1, 32, "1 KV heads")):
        gates = Gates({index: GateLayer(torch.zeros(heads, hidden), torch.zeros(heads)) for index in (0, 1)}, {})
        save_gates(gates, tmp_path / "g.safetensors")
        with install_gates(model, gates), pytest.raises(ValueError, match=reason):
            answer(model, f"gate:{tmp_path / 'g.safetensors'}")
    for family, reason in (("deepseek_v3", "caches latents"),):
        if not models.unavailable(family):
            with pytest.raises(ValueError, match=reason):
                install_gates(models.build(family), Gates({0: GateLayer(torch.zeros(2, 32), torch.zeros(2))}, {}))


@pytest.mark.filterwarnings("ignore:No layer of this")
@pytest.mark.parametrize("family", [*models.FAMILIES, *models.LINEAR_AND_FULL])
def test_every_family_has_a_place_for_gates(family: str, tmp_path: Path) -> None:
    """A gate is told of every token that comes to a layer which evicts."""
    if models.unavailable(family) or family == "deepseek_v3":
        pytest.skip(models.unavailable(family) or "latents have no heads")
    model = models.build(family)
    ids, mask = modes.batch("greedy", False)
    plain = PagedEvictionCache(model.config, budget=24, block_size=4, policy="keydiff")
    if not plain.paged_layers:
        return
    modes.forward(model, plain, ids, mask, 0, 5)
    heads = {index: layer.state.heads for index, layer in plain.paged_layers}
    hidden = model.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(0)
    gates = {i: GateLayer(torch.randn(n, hidden, generator=generator), torch.zeros(n)) for i, n in heads.items()}
    if family in ("zamba", "zamba2"):  # one module serves several layers
        with pytest.raises(ValueError, match=r"module.*index"):
            install_gates(model, Gates(gates, {}))
        return
    save_gates(Gates(gates, {}), tmp_path / "g.safetensors")
    with install_gates(model, tmp_path / "g.safetensors"):
        cache = answer(model, f"gate:{tmp_path / 'g.safetensors'}")[1]
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"allocator": "ada_kv", "heads": "separate"}, "allocator='ada_kv'"),
        ({"budget": "50%"}, "budget="),
        ({"budget": "16kB"}, "budget="),
        ({"static": True}, "leave keep_above= out"),
    ],
)
def test_keep_above_refuses(settings: dict[str, Any], reason: str, file: str) -> None:
    if "static" in settings and models.VERSION < (5, 14):
        pytest.skip("static=True needs transformers 5.14 or later")
    with pytest.raises(ValueError, match=reason):
        answer(models.build("llama", OURS), f"gate:{file}(keep_above=0.1)", **settings)


def test_keep_above_needs_our_attention_and_stands_alone(file: str) -> None:
    with pytest.raises(ValueError, match=r"'gate.*keep_above=0.1\)'"):
        answer(models.build("llama"), f"gate:{file}(keep_above=0.1)")
    with pytest.raises(ValueError, match="keep_above="):
        answer(models.build("llama", OURS), Hybrid(Gate(file, keep_above=0.1), H2O()))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gate:nowhere.safetensors", r"'nowhere.safetensors'"),
        ("gate:{file}(keep=1)", "keep_above"),
        ("gate:{file}(keep_above=much)", r"keep_above.*0.*'much'"),
        ("gate:{file}(keep_above=-1)", r"keep_above.*0"),
        ("gate:{file}(keep_above=1, room=-1)", r"room.*whole"),
    ],
)
def test_texts_that_are_no_policy(text: str, reason: str, file: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_policy(text.format(file=file))


def test_a_label_reads_back(file: str) -> None:
    for text in (f"gate:{file}", f"gate:{file}(keep_above=0.25)", f"gate:{file}(keep_above=0.25, room=16)"):
        assert make_policy(text).label == text
        assert make_policy(make_policy(text).label) == make_policy(text)


def test_nothing_is_wrong_with_the_policy(file: str) -> None:
    for text in (f"gate:{file}", f"gate:{file}(keep_above=0.25)"):
        assert check_policy(text) is None  # type: ignore[func-returns-value]
    assert check_policy(Hybrid(Gate(file), H2O())) is None  # type: ignore[func-returns-value]


def test_gates_are_read_as_they_were_written(file: str, tmp_path: Path) -> None:
    gates = load_gates(file)
    save_gates(gates, tmp_path / "again.safetensors")
    again = load_gates(tmp_path / "again.safetensors")
    assert again.digest == gates.digest
    assert again.model == gates.model


def test_with_policies_that_observe(file: str) -> None:
    """Tokens then wait for attention, and their marks with them."""
    model = models.build("llama", OURS)
    with install_gates(model, file):
        tokens, cache = answer(model, Hybrid(Gate(file), H2O(), weights=(1.0, 1e-9)))
        assert cache.stats().evicted_tokens > 0
        probed = PagedEvictionCache(model.config, budget=400, block_size=4, policy=Hybrid(Gate(file), H2O()))
        ids, mask = modes.batch("greedy", True)
        modes.forward(model, probed, ids, mask, 0, ids.shape[1])
    assert len(tokens) == len(ids)


@pytest.mark.contract
@pytest.mark.skipif(models.VERSION < (5, 14), reason="static=True needs transformers 5.14 or later")
def test_compiled_steps(file: str) -> None:
    """One graph without a break, hooks and marks in it; the tokens of a cache that is not static."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    model = models.build("llama")
    ids, mask = models.left_pad(models.prompts([40, 31, 22], seed=1))
    settings = {"budget": 24, "block_size": 4, "policy": f"gate:{file}", "heads": "separate"}
    how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9}
    with install_gates(model, file):
        plain = PagedEvictionCache(model.config, **settings)
        expected = model.generate(ids, **{CACHE_ARGUMENT: plain}, disable_compile=True, **how)
        for turn in range(2):  # another cache runs the same graph
            static = PagedEvictionCache(model.config, static=True, **settings)
            sequences = model.generate(ids, **{CACHE_ARGUMENT: static}, compile_config=config, **how)
            assert sequences.tolist() == expected.tolist(), turn
            assert static.block_scores().nan_to_num().tolist() == plain.block_scores().nan_to_num().tolist()
    assert dict(counters["graph_break"]) == {}
    assert int(counters["stats"]["unique_graphs"]) == 1
    torch._dynamo.reset()
    counters.clear()


def test_published_gates_are_of_their_model() -> None:
    gates = load_gates("smollm2-135m-instruct")
    gates.check_model(models.smollm2_config())
    assert set(gates.layers) == set(range(30)) and gates.facts["target"] == "kvzip"
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        load_gates("smollm2-135m")
