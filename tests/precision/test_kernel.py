"""The Triton kernels say what attention to the decoded tokens says: in Triton's interpreter, or on a GPU.

Triton decides when it is imported whether kernels are interpreted. So the cases run in a process of their own, which
`test_in_the_interpreter` starts, unless there is a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

# Before 3.8, the interpreter does not get along with NumPy 2.4.
pytest.importorskip("triton", "3.6" if torch.cuda.is_available() else "3.8")

import models
import modes
from closeness import assert_close
from coded_cases import Case
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.precision import few_bits, fused, launching, native

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in the process that test_in_the_interpreter starts, or on a GPU"
)


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the cases run in this process")
def test_in_the_interpreter() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    ran = subprocess.run(words, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.fixture(autouse=True)
def _on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs on a CPU, where a function in C, called anew or prepared, or a compiler would read the
    codes."""
    if DEVICE == "cpu":
        monkeypatch.setattr(native, "launch", launching.launch)
        monkeypatch.setattr(fused.CodesReader, "_prepare", lambda *_: None)
        monkeypatch.setattr(fused, "_missing", lambda device: None)


@kernels
@pytest.mark.parametrize("seed", range(16))
def test_reading_is_decoding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn shapes, bits, masks, lengths and types."""
    case = Case(seed, DEVICE)
    if DEVICE == "cpu":
        for name, choices in {"_PROGRAMS": (1, 8, 40), "_PART": (32, 64), "_PIECES": (16, 64)}.items():
            monkeypatch.setattr(launching, name, case.draw.choice(choices))
    heads = case.heads * case.group
    query = torch.randn(case.rows, heads, 1, case.key_dim).to(case.dtype)
    sinks = torch.randn(heads) if case.draw.random() < 0.3 else None
    logits = Logits(case.key_dim**-0.5, case.draw.choice([None, None, 5.0]), sinks)
    mask = case.mask()
    expected = case.expected(query, mask, logits)
    there = Logits(logits.scaling, logits.softcap, None if sinks is None else sinks.to(DEVICE))
    output = fused.read(case.held(), query.to(DEVICE), None if mask is None else mask.to(DEVICE), there)
    assert output.dtype == case.dtype
    share = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    assert_close(output.cpu().float().transpose(1, 2), expected, case, share=share)


#: A prompt, a chunk that overflows, single tokens.
PLAN = [(0, 22), (22, 29), *((at, at + 1) for at in range(29, 36))]


@kernels
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"bits": 3, "policy": "h2o"}),
        ("gpt_oss", {"bits": 4, "policy": "snapkv", "heads": "separate", "allocator": "ada_kv"}),
    ],
)
def test_a_model_says_the_same(family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole decode steps of padded rows, the scores of observers included."""
    monkeypatch.setattr(few_bits, "FEW", 0)
    model = models.build(family, "paged_eviction").to(DEVICE)
    ids, mask = (states.to(DEVICE) for states in models.left_pad(models.prompts([36, 25], seed=1)))
    logits, reads, original = [], [], fused.read
    monkeypatch.setattr(fused, "read", lambda *arguments: reads.append(1) or original(*arguments))
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(fused, "_missing", lambda device: "not now")
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
        logits.append(torch.stack([modes.forward(model, cache, ids, mask, *part)[:, -1] for part in PLAN]))
        assert len(reads) > 0
    assert_close(logits[0], logits[1])


@kernels
@pytest.mark.parametrize("allocator", ["uniform", Heads.of([[0.5, 1.5]] * 2)], ids=["uniform", "heads"])
def test_compiled_steps_call_them(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph without a break, in which one operator reads the codes."""
    monkeypatch.setattr(few_bits, "FEW", 0)
    model = models.build("llama", "paged_eviction").to(DEVICE)
    ids, mask = (states.to(DEVICE) for states in models.left_pad(models.prompts([36, 25], seed=1)))
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    settings = {"budget": 24, "block_size": 4, "bits": 4, "policy": "snapkv", "allocator": allocator}
    ours = modes.stepwise(
        model, ids, mask, PagedEvictionCache(model.config, static=True, attention_mask=mask, **settings), 10, backend
    )
    monkeypatch.setattr(fused, "_missing", lambda device: "not now")
    expected = modes.stepwise(model, ids, mask, PagedEvictionCache(model.config, **settings), 10)
    assert any("attend_to_codes" in name for name in called)
    assert_close(ours, expected)
