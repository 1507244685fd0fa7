"""A decode step of a static cache: one graph, whatever happens between the steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.precision import few_bits

pytestmark = pytest.mark.contract

TEXT = torch.stack(models.prompts([120] * 2, seed=5))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Neither before nor after: models are shared, and generate keeps what it compiled on them."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    torch._dynamo.reset()
    counters.clear()
    models.shared.cache_clear()  # generate keeps its compiled forward on the model


def graphs() -> int:
    """Graphs made so far; no graph may have a break."""
    assert dict(counters["graph_break"]) == {}
    return int(counters["stats"]["unique_graphs"])


def compilation(fullgraph: bool = True, backend: Any = "eager") -> Any:
    """What generate would do on an accelerator."""
    config = CompileConfig(fullgraph=fullgraph, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def make(model: Any, static: bool = True, **settings: Any) -> PagedEvictionCache:
    settings = {"budget": 24, "block_size": 4, **settings}
    if "kv_lora_rank" in model.config.to_dict():
        settings.setdefault("policy", "keydiff")
    return PagedEvictionCache(model.config, static=static, **settings)


def say(model: Any, cache: Any, ids: Tensor, mask: Tensor, steps: int, **how: Any) -> Any:
    how = how or {"disable_compile": True}
    settings = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "max_new_tokens": steps}
    return model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **settings, **how)


def assert_same(expected: Any, output: Any) -> None:
    assert output.sequences.tolist() == expected.sequences.tolist()
    for at, (ours, wanted) in enumerate(zip(output.logits, expected.logits, strict=True)):
        assert_close(ours, wanted, f"token {at}")


def inputs(prompt: int | None = None) -> dict[bool, tuple[Tensor, Tensor]]:
    ids, mask = models.left_pad(models.prompts([60, 45, 33], seed=1))
    ids = ids if prompt is None else ids[:, -prompt:]
    return {True: (ids, mask[:, -ids.shape[1] :]), False: (ids, torch.ones_like(ids))}


#: Graphs take seconds to make: the others wait for `--all-cases`.
ELSEWHERE = pytest.mark.all_cases
ONE_OF_EACH_KIND = ("qwen3", "mistral", "qwen3_next")
CASES = [
    ("llama", "paged_eviction", {"policy": "lazy_eviction", "heads": "separate"}),
    ("llama", "eager", {"budget": 128, "policy": "keydiff"}),
    ("qwen3", "paged_eviction", {"positions": "cache"}),
    ("mistral", "paged_eviction", {"policy": "h2o"}),
    ("deepseek_v3", "sdpa", {}),
    ("qwen3_next", "sdpa", {"bits": 4}),  # decoded in the graph
]


@pytest.mark.parametrize(
    ("family", "attention", "settings"),
    [
        pytest.param(*case, marks=() if case[0] in ONE_OF_EACH_KIND else ELSEWHERE, id=f"{case[0]}-{case[1]}")
        for case in CASES
    ],
)
def test_one_graph_for_everything(family: str, attention: str, settings: dict[str, Any]) -> None:
    """Evictions, a reset, another cache, other pads, a second turn."""
    model = models.shared(family, attention)
    cache = make(model, **settings)
    for padded, (ids, mask) in inputs().items():
        expected = say(model, make(model, static=False, **settings), ids, mask, 10)
        assert_same(expected, say(model, cache, ids, mask, 10, compile_config=compilation()))
        cache = make(model, **settings)
        assert_same(expected, say(model, cache, ids, mask, 10, compile_config=compilation()))
        cache.reset()
        assert graphs() == 1, padded
    ids, mask = inputs()[True]
    plain = make(model, static=False, **settings)
    for turn in range(2):
        expected = say(model, plain, ids, mask, 9)
        output = say(model, cache, ids, mask, 9, compile_config=compilation())
        assert_same(expected, output)
        ids = torch.cat([output.sequences, torch.stack(models.prompts([6] * 3, seed=turn))], dim=1)
        mask = modes.extend(mask, ids.shape[1] - mask.shape[1])
    assert graphs() == 1


@pytest.mark.parametrize(
    ("policy", "shares", "more"),
    [
        ("snapkv", "heads", {}),
        ("snapkv", "heads", {"bits": (4, 2)}),
        pytest.param("keydiff", "pyramid", {}, marks=ELSEWHERE),
        pytest.param("keydiff", "heads", {"positions": "cache"}, marks=ELSEWHERE),
    ],
)
def test_layers_and_heads_of_different_size(
    policy: str, shares: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read where it lies, by one graph with a mask, for slots that are not used yet, and one without."""
    monkeypatch.setattr(few_bits, "FEW", 0)
    model = models.build("llama", "paged_eviction", num_hidden_layers=2 if shares == "pyramid" else 1)
    allocator = Heads.of([[0.5, 1.5]]) if shares == "heads" else shares
    settings = {"policy": policy, "allocator": allocator, **more}
    plain, cache = make(model, static=False, **settings), make(model, **settings)
    ids, mask = inputs()[True]
    for turn in range(2):
        expected = say(model, plain, ids, mask, 12)
        output = say(model, cache, ids, mask, 12, compile_config=compilation())
        assert_same(expected, output)
        assert cache.stats().mean_held <= 24
        ids = torch.cat([output.sequences, torch.stack(models.prompts([9] * 3, seed=turn))], dim=1)
        mask = modes.extend(mask, ids.shape[1] - mask.shape[1])
    assert graphs() <= 2


def attention_calls(graph: torch.fx.GraphModule) -> list[Any]:
    return [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]


@pytest.mark.parametrize("policy", [pytest.param("paged_eviction", marks=ELSEWHERE), "h2o"])
def test_a_storage_that_fills_in_compiled_steps(policy: str) -> None:
    """Keys and values come to attention as they are held, KV heads not repeated, though there is a mask."""
    model, heads = models.build("llama", "paged_eviction", num_hidden_layers=1), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for call in attention_calls(graph):
            heads.extend(states.meta["example_value"].shape[1] for states in call.args[1:3])
        return graph.forward

    for padded, (ids, mask) in inputs(prompt=38).items():
        expected = say(model, make(model, static=False, policy=policy, budget=48), ids, mask, 20)
        compiled = {"compile_config": compilation(backend=backend)}
        assert_same(expected, say(model, make(model, policy=policy, budget=48), ids, mask, 20, **compiled))
        assert graphs() == 1, padded
    assert set(heads) == {model.config.num_key_value_heads} != {model.config.num_attention_heads}


def test_one_graph_while_layers_of_different_size_fill_up() -> None:
    """With pads: the graph depends on no number of held tokens."""
    model = models.shared("llama", "paged_eviction")
    (ids, mask), settings = inputs(40)[True], {"budget": 48, "policy": "keydiff", "allocator": "pyramid"}
    expected = say(model, make(model, static=False, **settings), ids, mask, 12)
    assert_same(expected, say(model, make(model, **settings), ids, mask, 12, compile_config=compilation()))
    assert graphs() == 1


@ELSEWHERE
def test_a_chunked_prefill_compiles_no_second_decode_graph() -> None:
    """A chunk goes through the compiled forward too, so it has breaks; the right tokens, and one graph for decode."""
    model = models.build("llama", num_hidden_layers=1)
    ids, mask = models.left_pad(models.prompts([30, 25, 9]))
    how = {"prefill_chunk_size": 30}
    expected = say(model, make(model, static=False), ids, mask, 9, disable_compile=True, **how)
    graph_counts = []
    for _ in range(2):
        assert_same(expected, say(model, make(model), ids, mask, 9, compile_config=compilation(False), **how))
        graph_counts.append(int(counters["stats"]["unique_graphs"]))
    assert graph_counts[0] == graph_counts[1]


# ---- a loop of one's own ------------------------------------------------------------------------------------------


def step_of(model: Any, fullgraph: bool = True, backend: Any = "eager") -> Any:
    return torch.compile(model.forward, fullgraph=fullgraph, dynamic=False, backend=backend)


def feed(step: Any, cache: Any, start: int, stop: int) -> Tensor:
    with torch.no_grad():
        output = step(
            input_ids=TEXT[:, start:stop],
            position_ids=torch.arange(start, stop)[None],
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        )
    return output.logits[:, -1]


@pytest.mark.parametrize(
    ("family", "attention", "policy", "graph_masks"),
    [("llama", "paged_eviction", "h2o", [[False] * 2, [True] * 2]), ("lfm2", "sdpa", "paged_eviction", [[True]])],
    ids=["llama", "lfm2"],
)
def test_a_loop_of_ones_own(family: str, attention: str, policy: str, graph_masks: list[list[bool]]) -> None:
    """Two graphs where the mask is dropped: the second prompt leaves slots unused, which fill up, and blocks are
    evicted on and on. Some steps are not compiled."""
    model, masks = models.shared(family, attention), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        masks.append([call.kwargs["attn_mask"] is not None for call in attention_calls(graph)])
        return graph.forward

    step = step_of(model, backend=backend)
    for prompt in (40, 12):
        plain, cache = make(model, static=False, policy=policy), make(model, policy=policy)
        for one in (plain, cache):
            feed(model, one, 0, prompt)
        for at in range(prompt, prompt + 24):
            compiled = at % 10 < 7
            if compiled:
                cache.prepare_step()
            ours, expected = feed(step if compiled else model, cache, at, at + 1), feed(model, plain, at, at + 1)
            assert_close(ours, expected)
        assert torch.equal(cache.block_table(plain.paged_layers[0][0]), plain.block_table(plain.paged_layers[0][0]))
    assert masks == graph_masks and graphs() == len(masks)


def test_a_step_that_was_not_prepared() -> None:
    """An error that says what to call, and after that call everything is as if nothing had happened."""
    model = models.build("llama", "paged_eviction", num_hidden_layers=1)
    step = step_of(model)
    plain, cache = make(model, static=False), make(model)
    for one in (plain, cache):
        feed(model, one, 0, 40)
    for at in range(40, 52):
        if at in (40, 44):
            with pytest.raises(RuntimeError, match="prepare_step"):
                feed(step, cache, at, at + 1)
            assert cache.get_seq_length() == at
        cache.prepare_step()
        ours, expected = feed(step, cache, at, at + 1), feed(model, plain, at, at + 1)
        assert_close(ours, expected)
    for change in ("reorder", "several", "reset"):  # each undoes prepare_step
        at = cache.get_seq_length()
        cache.prepare_step()
        if change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif change == "several":
            feed(model, cache, at, at + 4)
        else:
            cache.reset()
            feed(model, cache, 0, 9)
        with pytest.raises(RuntimeError, match="prepare_step"):
            feed(step, cache, cache.get_seq_length(), cache.get_seq_length() + 1)
            pytest.fail(change)


def test_without_fullgraph_a_step_is_right_even_if_not_prepared() -> None:
    model = models.build("llama", num_hidden_layers=1)
    step = step_of(model, fullgraph=False)
    plain, cache = make(model, static=False), make(model)
    for one in (plain, cache):
        feed(model, one, 0, 40)
    for at in range(40, 44):
        if at != 42:
            cache.prepare_step()
        ours, expected = feed(step, cache, at, at + 1), feed(model, plain, at, at + 1)
        assert_close(ours, expected)


@pytest.mark.parametrize("policy", [pytest.param("paged_eviction", marks=ELSEWHERE), "attention_mean"])
def test_a_cache_and_its_copy_by_turns(policy: str) -> None:
    """One graph serves both, and neither sees what the other is told."""
    model = models.build("llama", "paged_eviction", num_hidden_layers=1)
    step, plain, cache = step_of(model), make(model, static=False, policy=policy), make(model, policy=policy)
    for one in (plain, cache):
        feed(model, one, 0, 40)
    for at in range(40, 43):
        cache.prepare_step()
        feed(step, cache, at, at + 1)
        feed(model, plain, at, at + 1)
    runs = [(cache, plain, 43), (copy.deepcopy(cache), copy.deepcopy(plain), 70)]
    for at in range(10):
        for own, expected, start in runs:
            own.prepare_step()
            logits, expected_logits = (
                feed(call, one, start + at, start + at + 1) for call, one in ((step, own), (model, expected))
            )
            assert_close(logits, expected_logits)
    assert graphs() == 1
    assert not torch.equal(cache.block_table(), runs[1][0].block_table())


def test_inductor() -> None:
    """The real compiler, once."""
    changes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = models.build("llama", "paged_eviction", num_hidden_layers=1, **changes)
    ids, mask = inputs()[False]
    cache = make(model)
    output = say(model, cache, ids, mask, 20, compile_config=compilation(backend="inductor"))
    assert_same(say(model, make(model, static=False), ids, mask, 20), output)
    assert graphs() == 1
