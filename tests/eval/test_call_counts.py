"""How many calls of the library and how many operators of torch a token takes: a slower step shows without a clock."""

import pytest
from transformers import LlamaConfig, PreTrainedConfig

import counted
import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.precision import fused, native


@models.needs_514
def test_calls_are_few() -> None:
    """What a reader can follow, with slack of a few; where there are more, they are printed."""
    limits = {
        "token overwritten": (17, 6),
        "victim due": (120, 28),
        "token, static": (64, 19),
        "overflowing prompt": (128, 30),
        "prompt, snapkv@ada_kv": (210, 45),
    }
    for name, run_calls in counted.runs().items():
        most_calls, most_files = limits[name]
        few = 5 < len(run_calls) <= most_calls and len({call.file for call in run_calls}) <= most_files
        assert few, f"{name}\n{counted.tree(run_calls)}"


@models.needs_514
def test_layers_with_a_table_of_heads_choose_together() -> None:
    """A profile gives each head a budget of its own. All layers still choose at once, and then only write."""
    shares = Heads.of([[0.3 + layer % 7 / 5, 1.9 - layer % 5 / 3] for layer in range(30)])
    text = counted.Text("paged_eviction", layers=30, policy="keydiff", heads="separate", allocator=shares)
    text.read(counted.PROMPT)
    for _ in range(16):
        text.read(1)
    steps = [text.calls(1) for _ in range(16)]
    chosen = [sum(call.name == "choose" and call.file == "table/victims.py" for call in calls) for calls in steps]
    assert max(chosen) == 1 and sum(chosen) <= 2  # the blocks of heads that hold the whole prompt end at another token
    counts = [len(calls) for calls in steps]
    assert min(counts) <= 561 and max(counts) <= 1450, counts


@models.needs_514
def test_operators_are_few() -> None:
    """With some slack: a release of transformers or torch may do with a few more."""
    limits = {
        "keydiff": (2, 10),
        "snapkv": (4, 25),
        "static": (18, 28),
        "4 bits": (22, 40) if native.missing() is None else (112, 140),
        "shares of heads": (20, 40),
    }
    counts = counted.operators()
    assert set(counts) == set(limits)
    for name, (least, mean) in counts.items():
        assert least <= limits[name][0] and mean <= limits[name][1], (name, least, mean)


@models.needs_514
def test_operators_in_few_bits_are_few_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_missing", lambda device: "not now")
    case = {"policy": "keydiff", "bits": 4, "budget": 384}  # so many tokens that they are read as they lie
    ((least, mean),) = counted.operators({"read as they lie": case}).values()
    assert 60 < least <= 108 and mean <= 135, (least, mean)


def test_a_cache_is_made_without_reading_the_configuration_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an attribute of a configuration takes microseconds, and most of the time that making a cache takes."""
    config = LlamaConfig(num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    PagedEvictionCache(config, budget=64)  # what is learned once for a model
    reads, read = 0, PreTrainedConfig.__getattribute__

    def counting(self: PreTrainedConfig, name: str) -> object:
        nonlocal reads
        reads += 1
        return read(self, name)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", counting)
    PagedEvictionCache(config, budget=64)
    assert 50 < reads < 1150
