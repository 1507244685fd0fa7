"""Keys and values in 8 bits: as `PagedEvictionCache` alone whose keys and values are rounded so."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from alone import Rounding
from engines import Server, drawn, served
from hf_paged_eviction_vllm.cpu import CpuPages
from hf_paged_eviction_vllm.pages import LayerPages, PlainPages
from tiny_models import tiny

TYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
without = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512 for 8 bits on a CPU")


def _layers(server: Server) -> list[Any]:
    context = server.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return list(context.values())


@without
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp8", {"policy": "keydiff"}),
        ("fp8_e5m2", {"policy": "snapkv", "heads": "separate"}),
        ("fp8", {"policy": "h2o", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}),
        ("fp8", {"policy": "paged_eviction", "block_size": 4}),
    ],
)
def test_answers_are_those_of_rounded_keys_and_values(kind: str, options: dict[str, Any]) -> None:
    (folder, model), rng = tiny("llama"), random.Random(1)
    prompts = {f"r{count}": drawn(rng, count) for count in (250, 100, 33)}
    with served(folder, model, {"budget": 96} | options, kv_cache_dtype=kind, max_num_batched_tokens=128) as server:
        server.rounding = Rounding(TYPES[kind], 0.25, 2.0)
        for layer in _layers(server):
            layer._k_scale_float, layer._v_scale_float = server.rounding.keys, server.rounding.values
        for name, prompt in prompts.items():
            server.add(name, prompt, 60)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        for name, prompt in prompts.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()


@without
def test_a_turn_goes_on_from_a_snapshot_in_8_bits() -> None:
    (folder, model), rng = tiny("llama"), random.Random(2)
    options = {"budget": 96, "policy": "key_norm"}
    with served(folder, model, options, kv_cache_dtype="fp8") as server:
        prompt = drawn(rng, 150)
        server.add("first", prompt, 74)  # up to the last token of a whole block
        (given,) = server.finish().values()
        server.add("again", (prompt + given)[:193], 30)
        server.add("unread", prompt, 74, anew=True)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        assert next(chunks for name, chunks in server.record.chunks.items() if name.startswith("again-"))[0] == 1
        assert answers["unread"] == given
        assert answers["again"] == given[43:73]


def _pages(kind: type[LayerPages], stored: str, sets: int, dtype: torch.dtype) -> LayerPages:
    """Two layers of five blocks of 32 tokens, with four heads."""
    memory = torch.zeros(2, 5, 4, 32, 64, dtype=torch.uint8 if stored in TYPES else dtype)
    more = {"kv_cache_dtype": stored, "isa": "vec"}
    layers = [
        SimpleNamespace(kv_cache=memory[at], _k_scale_float=0.3, _v_scale_float=1.7 + at, **more) for at in range(2)
    ]
    return kind(layers, sets, 32, dtype)


@pytest.mark.parametrize("stored", ["auto", *TYPES])
@pytest.mark.parametrize("sets", [1, 4])
@pytest.mark.parametrize("kind", [PlainPages, pytest.param(CpuPages, marks=without)])
def test_blocks(kind: type[LayerPages], sets: int, stored: str) -> None:
    """What is written is read rounded; writing again what was read changes nothing, and moving changes no bit."""
    current_platform.import_kernels()
    rng, dtype = torch.Generator().manual_seed(0), torch.float32
    pages = _pages(kind, stored, sets, dtype)
    slots = torch.randperm(5 * sets * 32, generator=rng)[:40] + pages.starts[1] * 32
    keys, values = (torch.randn(40, 4 // sets, 32, generator=rng, dtype=dtype) * 200 for _ in range(2))
    pages.write(1, keys, values, slots)
    found = pages.read_slots(1, slots)
    for states, one, scale in zip((keys, values), found, (0.3, 2.7), strict=True):
        wanted = states if stored == "auto" else Rounding(TYPES[stored], cut=False)(states, scale)
        assert torch.equal(one, wanted)
    pages.write(1, *found, slots)
    assert all(map(torch.equal, found, pages.read_slots(1, slots)))
    for one, other in zip(pages.read(1, slots // 32), found, strict=True):
        assert torch.equal(one[torch.arange(40), :, slots % 32], other)
    to = torch.arange(40)  # of another layer
    pages.move(slots, to)
    assert all(map(torch.equal, pages._read_slots(slots), pages._read_slots(to)))
    pages.write_new(1, keys, values, slots)
    nearest = [Rounding(TYPES[stored], cut=kind is CpuPages)(keys, 0.3)] if stored in TYPES else [keys]
    assert (pages.read_slots(1, slots)[0] == nearest[0]).float().mean() > 0.99  # the kernel multiplies by 1 / 0.3
