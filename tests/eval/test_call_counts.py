"""How many calls of the library and how many operators of torch a token takes: a slower step shows without a clock."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedConfig

import counted
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.precision import fused, native


def test_calls_are_few() -> None:
    """What a reader can follow; where there are more, they are printed."""
    limits = {
        "token overwritten": (16, 6),
        "victim due": (123, 28),
        "token, static": (59, 19),
        "overflowing prompt": (123, 28),
        "prompt, snapkv@ada_kv": (206, 44),
    }
    for name, run_calls in counted.runs().items():
        most_calls, most_files = limits[name]
        few = 5 < len(run_calls) <= most_calls and len({call.file for call in run_calls}) <= most_files
        assert few, f"{name}\n{counted.tree(run_calls)}"


#: Calls and files of 30 layers: of a prompt that overflows, of the first token behind it and of the third, when some
#: heads have room left, of a token inside a block, of the end of a block, and of a token before the cache is full. They
#: may fall; whoever makes them fewer writes the new numbers here.
THIRTY = {
    "equal": ((3417, 33), (1751, 34), (348, 10), (348, 10), (1160, 34), (348, 10)),
    "heads": ((4797, 41), (2644, 39), (501, 12), (501, 12), (1384, 39), (591, 13)),
    "heads in 4 bits": ((10531, 47), (3836, 46), (501, 13), (501, 13), (1525, 46), (588, 19)),
    "heads in 4 bits, snapkv": ((11157, 52), (3504, 47), (591, 16), (591, 16), (2440, 33), (678, 22)),
    "heads in 4 bits, observed": ((11848, 54), (4709, 51), (591, 16), (591, 16), (2440, 33), (678, 22)),
    "static": ((3629, 35), (2584, 34), (1002, 22), (1002, 22), (1737, 33), (1125, 22)),
}


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_calls_of_thirty_layers_only_fall(tmp_path: Path) -> None:
    """A profile gives each head a budget of its own, and 4 bits. All layers still choose at once, then only write."""
    counts = {}
    for name, events in counted.thirty_layers(tmp_path):
        counts[name] = tuple((len(calls), len({call.file for call in calls})) for calls in events.values())
        chosen = [call for call in events["end of a block"] if call[1:] == ("table/victims.py", "choose")]
        assert len(chosen) <= 1, name
    assert counts.keys() == THIRTY.keys()
    for name, now in counts.items():
        for (calls, files), (most_calls, most_files) in zip(now, THIRTY[name], strict=True):
            assert calls <= most_calls and files <= most_files, (name, now, THIRTY[name])


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
