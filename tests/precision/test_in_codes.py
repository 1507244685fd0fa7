"""Attention that reads codes by torch operators says what attention to the decoded tokens says."""

from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.in_place import carried
from hf_paged_eviction.attention.parts import Part, join, read
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.precision import few_bits, fused, in_codes
from hf_paged_eviction.precision.in_codes import InCodes
from hf_paged_eviction.store.store import Store

#: How many slots were read each time.
Reads = list[int]


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests hold few tokens, and nothing but torch reads them."""
    monkeypatch.setattr(few_bits, "FEW", 0)
    monkeypatch.setattr(fused, "_missing", lambda device: "not now")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads: Reads = []
    original = InCodes.read

    def counting(self: InCodes, *args: Any) -> Any:
        reads.append(self.columns.shape[2])
        return original(self, *args)

    monkeypatch.setattr(InCodes, "read", counting)
    return reads


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # the latter turns some channels only
@pytest.mark.parametrize("bits", [8, 4, 3, 2, (4, 8), (8, 2)], ids=str)
def test_reading_is_decoding(
    bits: Any, family: str, heads: Any, hidden: bool, sinks: bool, softcap: float | None
) -> None:
    """Tokens that are not rounded, tokens that wait for their codes and pads included."""
    model = models.shared(family)
    settings = {"budget": 40, "block_size": 8, "policy": "keydiff", "bits": bits, "heads": heads, "sink_tokens": 6}
    cache = PagedEvictionCache(model.config, **settings)
    ids, mask = models.left_pad(models.prompts([70, 25], seed=3))
    for start, stop in [(0, 50), *((at, at + 1) for at in range(50, 61))]:
        modes.forward(model, cache, ids, mask, start, stop)
    store = cache.layers[1].store
    assert store.rounds
    keys, values = store.shown()
    query = torch.randn(2, 2 * keys.shape[1], 1, keys.shape[-1])
    logits = Logits(0.7, softcap, torch.randn(query.shape[1]) if sinks else None)
    visible = (torch.arange(keys.shape[2]) % 3 > 0)[None, None, None].expand(2, 1, 1, -1) if hidden else None
    bias = None if visible is None else torch.where(visible, 0.0, float("-inf"))
    expected = join([read(query, Part(keys, values, bias), logits)], logits)
    attend: Any = carried(store.carrier(keys[:, :, :1]))  # type: ignore[arg-type]
    for fuses, shown in ((False, visible), (True, bias)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_codes, "fuses", lambda fuses=fuses: fuses)
            output = attend(query, shown, logits).transpose(1, 2)
        assert_close(output, expected)


def says(model: Any, cache: Any, plan: list[tuple[int, int]]) -> torch.Tensor:
    """The last logits of each forward."""
    ids, mask = models.left_pad(models.prompts([60, 41], seed=1))
    return torch.stack([modes.forward(model, cache, ids, mask, *part)[:, -1] for part in plan])


#: A prompt, a chunk that overflows smaller budgets, single tokens, a second turn, more tokens.
PLAN = [(0, 22), (22, 29), *((at, at + 1) for at in range(29, 45)), (45, 50), *((at, at + 1) for at in range(50, 60))]


@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "h2o", "snapkv"])
@pytest.mark.parametrize("bits", [8, 4, 3, (4, 2)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("budget", [24, 40, 68])
def test_static(reads: Reads, budget: int, family: str, bits: Any, policy: str) -> None:
    """A step that reads codes says what one that decodes them says, before and after the storage is full."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, "paged_eviction")
    settings = {"budget": budget, "block_size": 4, "policy": policy, "bits": bits}
    logits = says(model, PagedEvictionCache(model.config, static=True, **settings), PLAN)
    singles = sum(stop - start == 1 for start, stop in PLAN)
    assert len(reads) % singles == 0 and set(reads) == {budget}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "carrier", lambda *_: None)
        expected = says(model, PagedEvictionCache(model.config, static=True, **settings), PLAN)
    assert_close(logits, expected)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"bits": 3, "policy": "h2o"}),
        ("gpt_oss", {"bits": (4, 2), "policy": "keydiff", "heads": "separate"}),
        ("gemma3", {"bits": (4, 8), "policy": "snapkv"}),
        ("llama", {"bits": 4, "policy": "paged_eviction", "recent_tokens": 0, "sink_tokens": 0}),
        ("llama", {"bits": 4, "policy": "snapkv", "heads": "separate", "allocator": "ada_kv"}),
        ("gpt_oss", {"bits": (8, 4), "policy": "kvzip", "allocator": "d2o"}),
        ("llama", {"bits": (4, 2), "policy": "h2o", "allocator": "pyramid"}),
    ],
)
@pytest.mark.parametrize("budget", [24, 40, 68])
def test_eager(reads: Reads, budget: int, family: str, settings: dict[str, Any]) -> None:
    """Single tokens read codes, while pads are held (40) and while the storage fills up (68), too."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model, plain = models.shared(family, "paged_eviction"), {"budget": budget, "block_size": 4, **settings}
    logits = says(model, PagedEvictionCache(model.config, **plain), PLAN)
    assert reads
    if "allocator" not in settings and settings["policy"] in {"keydiff", "paged_eviction"}:
        singles = sum(stop - start == 1 for start, stop in PLAN)
        assert len(reads) % singles == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "carrier", lambda *_: None)
        expected = says(model, PagedEvictionCache(model.config, **plain), PLAN)
    assert_close(logits, expected)


@pytest.mark.parametrize(("few", "read"), [(95, 24), (96, 24), (97, None)])  # 24 slots, 2 rows, 2 KV heads
@pytest.mark.parametrize("static", [False, True])
def test_few_tokens_are_decoded(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, static: bool, few: int, read: int | None
) -> None:
    monkeypatch.setattr(few_bits, "FEW", few)
    model = models.shared("llama", "paged_eviction")
    settings: Any = {"budget": 24, "block_size": 4, "policy": "keydiff", "bits": 4, "static": static}
    says(model, PagedEvictionCache(model.config, **settings), PLAN)
    assert set(reads) == ({read} if read else set())


def test_what_needs_keys_gets_them(reads: Reads) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = models.paged(model.config, budget=24, block_size=4, policy="keydiff", bits=4, record_past=True)
    says(model, cache, PLAN)
    assert not reads and cache.stats().evicted_tokens > 0


def test_another_attention_after_the_prompt_gets_keys(reads: Reads) -> None:
    model = models.build("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="keydiff", bits=4, static=True)
    before = says(model, cache, PLAN[:4])
    assert len(before) == 4 and len(reads) == 2 * len(model.model.layers)
    model.set_attn_implementation("sdpa")
    says(model, cache, PLAN[4:])
    assert len(reads) == 2 * len(model.model.layers)


def test_a_compiled_step_reads_codes() -> None:
    """In one graph, which knows of no attention to keys and values."""
    from transformers import CompileConfig

    model, sequences, graphs = models.build("llama", "paged_eviction", num_hidden_layers=1).double(), [], []
    ids, mask = models.left_pad(models.prompts([30, 21], seed=1))

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    for how in ({"disable_compile": True}, {"compile_config": config}):
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="h2o", bits=4, static=True)
        sequences.append(modes.generate(model, cache, ids, mask, 14, **how))
    torch._dynamo.reset()
    assert len(graphs) == 1 and not [name for name in graphs[0] if "scaled_dot_product" in name]
    assert sequences[0].tolist() == sequences[1].tolist()
