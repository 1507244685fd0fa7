"""The function in C says what attention to the decoded tokens says, and `missing` says why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from coded_cases import Case
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.precision import fused, native

compiled = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@compiled
@pytest.mark.parametrize("seed", [seed for seed in range(32) if seed % 8 not in (4, 5)])
def test_reading_is_decoding(seed: int) -> None:
    """Drawn shapes, bits, masks, lengths and types; the parts of the slots may be read by several threads."""
    case = Case(seed, "cpu")
    heads = case.heads * case.group
    query = torch.randn(case.rows, heads, 1, case.key_dim).to(case.dtype)
    sinks = torch.randn(heads) if case.draw.random() < 0.3 else None
    logits = Logits(case.key_dim**-0.5, case.draw.choice([None, None, 5.0]), sinks)
    mask = case.mask()
    expected, held = case.expected(query, mask, logits), case.held()
    assert fused.obstacle(held, query) is None
    output = fused.read(held, query, mask, logits)
    assert output.dtype == case.dtype
    share = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    assert_close(output.float().transpose(1, 2), expected, case, share=share)


@compiled
@pytest.mark.parametrize("ragged", [False, True])
def test_many_parts_are_joined_whoever_reads_them(ragged: bool) -> None:
    lengths = [1500, 700, 0, 40] if ragged else [1100] * 4
    case = Case(0, "cpu", rows=2, heads=2, ragged=ragged, lengths=lengths, dtype=torch.float32)
    query, mask, logits = torch.randn(2, 2 * case.group, 1, case.key_dim), case.mask(), Logits(0.125)
    outputs, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs.append(fused.read(case.held(), query, mask, logits))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)
    assert_close(outputs[0].transpose(1, 2), case.expected(query, mask, logits), case, share=1e-5)


@compiled
@pytest.mark.parametrize("bits", [(4, None), (None, 2)])
def test_what_is_not_rounded_is_read_by_torch(bits: tuple[int | None, int | None]) -> None:
    case = Case(0, "cpu", bits=bits)
    query = torch.zeros(case.rows, case.heads * case.group, 1, case.key_dim)
    assert fused.obstacle(case.held(), query) == "keys or values are not in few bits"
    with pytest.raises(ValueError, match="reads keys and values in few bits"):
        fused.read(case.held(), query, None, Logits(0.125))


#: A prompt, a chunk that overflows smaller budgets, single tokens, a second turn, more tokens.
PLAN = [(0, 22), (22, 29), *((at, at + 1) for at in range(29, 40)), (40, 45), *((at, at + 1) for at in range(45, 52))]


@compiled
@pytest.mark.parametrize("budget", [24, 68])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"bits": 3, "policy": "h2o"}),
        ("gpt_oss", {"bits": (4, 2), "policy": "snapkv", "heads": "separate", "allocator": "ada_kv"}),
        ("gemma3", {"bits": 8, "policy": "keydiff", "heads": "separate"}),
    ],
)
def test_a_model_says_the_same(
    family: str, settings: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows, while the storage fills up (68) and when it is full, the scores of observers included."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, "paged_eviction")
    ids, mask = models.left_pad(models.prompts([60, 41], seed=1))
    logits, reads, launch = [], [], native.launch
    monkeypatch.setattr(native, "launch", lambda *arguments: reads.append(1) or launch(*arguments))
    for cold in (False, True):
        if cold:
            monkeypatch.setattr(fused, "_missing", lambda device: "not now")
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4, **settings)
        logits.append(torch.stack([modes.forward(model, cache, ids, mask, *part)[:, -1] for part in PLAN]))
        assert len(reads) > 0
    assert_close(*logits)


@pytest.fixture
def _another_compiler() -> Iterator[None]:
    native._library.cache_clear()
    yield
    native._library.cache_clear()


@pytest.mark.usefixtures("_another_compiler")
def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert "there is no C compiler" in str(native.missing())


@pytest.mark.usefixtures("_another_compiler")
def test_a_compiler_that_refuses_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "sh -c 'echo no room left >&2; exit 1'")
    with pytest.warns(UserWarning, match="operators of torch do it, in more time: no room left"):
        assert "no room left" in str(native.missing())
    assert native.missing() is not None  # and no second warning
