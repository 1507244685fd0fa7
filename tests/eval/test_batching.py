"""The first guess at a batch size."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import LlamaConfig, MixtralConfig

from asking import asked
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.running import batching
from hf_paged_eviction_eval.running.batching import numbers_per_token, start_size, weight_count

GIB = 1 << 30
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    dtype="bfloat16",
)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda size: monkeypatch.setattr(batching, "free_bytes", lambda settings: size)


def test_it_grows_with_memory_and_shrinks_with_the_prompt(free: Any) -> None:
    sizes = []
    for memory in (1, 24, 40, 80, 10_000):
        free(memory * GIB)
        options = asked(dtype="bfloat16", device="cuda")
        sizes.append([start_size(options, LLAMA_8B, tokens) for tokens in (512, 8192, 131072)])
    assert sizes[0] == [1, 1, 1] and sizes[-1] == [64, 64, 64]
    for smaller, larger in pairwise(sizes):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))
    assert all(row == sorted(row, reverse=True) for row in sizes)
    assert all(size & (size - 1) == 0 for row in sizes for size in row)
    assert sizes[3][1] in (8, 16, 32) and sizes[3][2] == 1


def test_precision_and_eager_attention_count(free: Any) -> None:
    free(80 * GIB)
    there = asked(dtype="float16", device="cuda")
    half = start_size(there, LLAMA_8B, 8192)
    assert start_size(there.but(dtype="float32"), LLAMA_8B, 8192) < half
    assert start_size(there.but(attn_implementation="eager"), LLAMA_8B, 8192) < half
    showing = there.but(attn_implementation="paged_eviction")
    assert start_size(showing, LLAMA_8B, 8192) < half
    assert start_size(showing.but(share_prefill=False), LLAMA_8B, 8192) == half
    assert batching.bytes_per_number(asked(), LLAMA_8B) == 4
    assert batching.bytes_per_number(asked(device="cuda"), LLAMA_8B) == 2


def test_rows_of_a_larger_model_are_soon_written_on_a_cpu(free: Any) -> None:
    free(10_000 * GIB)
    model, _ = embedded.load()
    assert start_size(asked(), LLAMA_8B, 512) == 8 < start_size(asked(device="cuda"), LLAMA_8B, 512)
    assert start_size(asked(), model.config, 512) == 64


def test_sizes_of_models() -> None:
    assert numbers_per_token(LLAMA_8B) == (64 * 1024, 128 * 1024)
    assert weight_count(LLAMA_8B) == pytest.approx(8.03e9, rel=0.02)
    assert weight_count(MixtralConfig()) == pytest.approx(46.7e9, rel=0.03)
    model, _ = embedded.load()
    assert weight_count(model.config) == pytest.approx(model.num_parameters(), rel=0.2)


def test_files_that_the_system_keeps_in_memory_leave_it_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=24 * GIB, available=16 * GIB, free=2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert batching.free_bytes(asked()) == 16 * GIB
