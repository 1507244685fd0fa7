"""`static=True` without compilation: the same tokens, logits and blocks as the cache that moves its tensors about.

Compiled steps are in test_static_compiled.py; any calls in tests/fuzz.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_no_synchronisation import Watch, no_lists, within
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.store.store import Store

pytestmark = pytest.mark.contract

MODES = tuple(mode for mode in modes.MODES if mode not in modes.SPECULATIVE)
TEXT = torch.stack(models.prompts([130] * 3, seed=5))


def pair(model: Any, **settings: Any) -> tuple[PagedEvictionCache, PagedEvictionCache]:
    """The cache that is known to be right, and the static one."""
    settings = {"budget": 24, "block_size": 4, **settings}
    if "kv_lora_rank" in model.config.to_dict():
        settings.setdefault("policy", "keydiff")
    plain, static = (PagedEvictionCache(model.config, static=fixed, **settings) for fixed in (False, True))
    return plain, static


@torch._dynamo.disable
def copied(states: Tensor) -> Tensor:
    """With CUDA graphs, what compiled code copies lies where the next step writes."""
    return states.clone()


def followed(model: Any, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What a run returns, and the last logits of each of its forwards."""
    logits, forward = [], model.forward

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        logits.append(copied(output.logits[:, -1]))
        return output

    model.__dict__["forward"] = recorded
    try:
        return run(), logits
    finally:
        del model.__dict__["forward"]


def assert_same_logits(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for at, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert_close(one, other, f"forward {at}")


def assert_same_state(plain: PagedEvictionCache, static: PagedEvictionCache) -> None:
    for (index, one), (_, other) in zip(plain.paged_layers, static.paged_layers, strict=True):
        # The blocks first: reading them brings a static layer up to date, `positions` must do so too.
        assert torch.equal(plain.block_table(index), static.block_table(index))
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.table.choice.evicted_blocks, other.table.choice.evicted_blocks)
        assert (one.held, one.get_seq_length()) == (other.held, other.get_seq_length())
        torch.testing.assert_close(
            plain.block_scores(index), static.block_scores(index), equal_nan=True, rtol=1e-4, atol=1e-5
        )


def compare(model: Any, mode: str, padded: bool, **settings: Any) -> None:
    caches, inputs = pair(model, **settings), modes.batch(mode, padded)
    (tokens, logits), (static_tokens, static_logits) = (
        followed(model, functools.partial(modes.run, model, cache, mode, *inputs)) for cache in caches
    )
    assert tokens.tolist() == static_tokens.tolist()
    assert_same_logits(logits, static_logits)
    assert_same_state(*caches)


def feed(model: Any, cache: Any, plan: Sequence[tuple[int, int]], ids: Tensor = TEXT) -> list[Tensor]:
    """Unpadded text without any mask; last logits of each forward."""
    with torch.no_grad():
        return [
            model(
                input_ids=ids[:, start:stop],
                position_ids=torch.arange(start, stop)[None],
                **{CACHE_ARGUMENT: cache},
                use_cache=True,
            ).logits[:, -1]
            for start, stop in plan
        ]


def prompt_and_steps(prompt: int, stop: int) -> list[tuple[int, int]]:
    return [(0, prompt), *((at, at + 1) for at in range(prompt, stop))]


# ---- the same as the other cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "paged_eviction"])
def test_every_mode(mode: str, padded: bool, attention: str) -> None:
    compare(models.shared("llama", attention), mode, padded)


WINDOWS = ("gemma2", "gemma3", "gpt_oss", "llama4", "mistral_sliding")
FAMILIES = [family for family in models.FAMILIES if family not in ("llama", *WINDOWS)]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["beam", "direct", "two_turns"])
@pytest.mark.parametrize("attention", ["sdpa", "paged_eviction"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, attention: str, mode: str, padded: bool) -> None:
    compare(models.shared(family, attention), mode, padded, heads="separate")


def unequal(model: Any, shares: str) -> dict[str, Any]:
    """Settings with which layers, or heads, hold different numbers of tokens."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    if shares == "layers":
        return {"allocator": Heads.of([[3 + layer % 3] for layer in range(layers)])}
    if shares == "heads":
        return {"allocator": Heads.of(torch.rand(layers, heads, generator=torch.Generator().manual_seed(3)) + 0.1)}
    return {"allocator": shares}


SHARES = ("heads", "first_prompt", "pyramid", "layers", "cake", "d2o", "ada_kv")


@pytest.mark.parametrize("mode", ["greedy", "beam", "two_turns"])
@pytest.mark.parametrize("policy", ["snapkv", "keydiff", "tova"])
@pytest.mark.parametrize("shares", SHARES)
def test_heads_of_different_size_in_a_padded_copy(
    shares: str, policy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where none is read where it lies."""
    monkeypatch.setattr(Store, "carrier", lambda *_: None)
    model = models.shared("llama", "paged_eviction")
    compare(model, mode, True, policy=policy, **unequal(model, shares))


def test_a_budget_larger_than_the_prompt_in_inference_mode_and_out_of_it() -> None:
    model = models.shared("llama", "paged_eviction")
    caches = pair(model, policy="h2o")
    logits = []
    for cache in caches:
        with torch.inference_mode():
            steps = feed(model, cache, prompt_and_steps(5, 12))
        steps += feed(model, cache, [(at, at + 1) for at in range(12, 40)])
        with torch.inference_mode():
            steps += feed(model, cache, [(40, 46), *((at, at + 1) for at in range(46, 60))])
        logits.append(steps)
    assert_same_logits(*logits)
    assert_same_state(*caches)


# ---- the host -----------------------------------------------------------------------------------------------------


def addresses(cache: PagedEvictionCache) -> list[int]:
    pointers = [states.data_ptr() for layer in cache.layers for states in (layer.keys, layer.values)]
    next_slots = [layer.state.next_slots for _, layer in cache.paged_layers]
    return pointers + [slots.slots.data_ptr() for slots in next_slots if slots is not None]


@pytest.mark.parametrize("policy", ["paged_eviction", "h2o"])
def test_no_tensor_ever_moves(policy: str) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = pair(model, policy=policy)[1]
    feed(model, cache, prompt_and_steps(9, 11))
    start = addresses(cache)
    for at in range(11, 60):
        feed(model, cache, [(at, at + 1)])
        if at % 7 == 0:
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert len(start) == len(addresses(cache)) == 6
        assert addresses(cache) == start
    feed(model, cache, [(60, 66), (66, 67)])
    assert addresses(cache) == start
    cache.reset()
    feed(model, cache, prompt_and_steps(40, 45))
    assert addresses(cache) == start


@pytest.mark.parametrize(
    "settings", [*({"policy": name} for name in ("paged_eviction", "keydiff", "random", "h2o")), {"bits": 4}], ids=str
)
@pytest.mark.parametrize("growing", [False, True], ids=["full", "growing"])
def test_the_host_reads_no_tensor(settings: dict[str, Any], growing: bool) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = pair(model, **settings)[1]
    prompt = 9 if growing else 40
    feed(model, cache, prompt_and_steps(prompt, prompt + 1))
    watch = Watch()
    for at in range(prompt + 1, prompt + 30):
        with watch, no_lists():
            cache.prepare_step()
        with pytest.MonkeyPatch.context() as patch:
            for layer in cache.layers:
                patch.setattr(layer, "update", within(watch, layer.update))
            feed(model, cache, [(at, at + 1)])
    assert watch.operators
    assert watch.waiting == []


def test_a_common_step_of_the_host_is_one_small_copy_per_layer_group() -> None:
    model = models.shared("llama")
    cache = pair(model, block_size=16, budget=64)[1]
    feed(model, cache, prompt_and_steps(70, 72))
    watch = Watch()
    with watch:
        cache.prepare_step()
    assert sum(watch.operators.values()) <= 12
    assert watch.largest <= 4 * 3


# ---- rows, copies, failures, readings -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["paged_eviction", "h2o", "keydiff"])
def test_looking_at_it_changes_nothing(policy: str) -> None:
    model = models.shared("llama", "paged_eviction")
    plain, cache = pair(model, policy=policy)
    for start, stop in prompt_and_steps(20, 60):
        if start:
            cache.prepare_step()
            cache.prepare_step()
            cache.get_mask_sizes(1)
        assert_same_logits(*(feed(model, one, [(start, stop)]) for one in (plain, cache)))
        assert (repr(cache), cache.stats()) == (repr(cache), cache.stats())
        cache.block_scores(start % 2)
        assert cache.get_seq_length() == stop
    assert_same_state(plain, cache)


def test_reset_and_a_poisoned_storage() -> None:
    """What another prompt left is neither seen nor multiplied by zero."""
    model = models.shared("llama", "sdpa")
    plain, cache = pair(model)
    feed(model, cache, prompt_and_steps(60, 70))
    for layer in cache.layers:
        for states in layer.store.read():
            states.fill_(float("nan"))
    cache.reset()
    plan = prompt_and_steps(5, 40)
    assert_same_logits(feed(model, cache, plan), feed(model, plain, plan))
    assert_same_state(plain, cache)


# ---- what it cannot do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes.SPECULATIVE)
def test_assisted_decoding_is_refused(mode: str) -> None:
    model = models.shared("llama")
    with pytest.raises(ValueError, match="assisted decoding"):
        modes.run(model, pair(model)[1], mode, *modes.batch(mode, padded=False))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_other_attention_is_refused(attention: str) -> None:
    model = models.build("llama")
    cache = pair(model)[1]
    model.config._attn_implementation = attention
    with pytest.raises(ValueError, match=f"{attention}.*set_attn_implementation.*static=False"):
        pair(model)
    with pytest.raises(ValueError, match=attention):
        model.config._attn_implementation = "sdpa"
        feed(model, cache, [(0, 9)])
        model.config._attn_implementation = attention
        cache.prepare_step()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda cache: cache.crop(-1), "static=False"),
        (lambda cache: cache.crop(5), "static=False"),
        (lambda cache: cache.activate_past_recording(), "assisted decoding"),
        (lambda cache: cache.shrink(16), "cannot shrink"),
    ],
)
def test_what_changes_its_size_is_refused(call: Callable[[Any], None], says: str) -> None:
    model = models.shared("llama")
    cache = pair(model)[1]
    feed(model, cache, prompt_and_steps(20, 22))
    with pytest.raises(ValueError, match=says):
        call(cache)
    assert cache.get_seq_length() == 22


def test_models_are_refused() -> None:
    latent = models.shared("deepseek_v3", "paged_eviction").config
    refusals = [(latent, "'h2o'"), (models.family_config("mistral_sliding"), "StaticCache")]
    # transformers' class of layers with a window would be compiled again as its count of tokens grows.
    refusals += [(models.family_config(name), r"window.*static=False") for name in WINDOWS[:-1]]
    for config, says in refusals:
        with pytest.raises(ValueError, match=says):
            PagedEvictionCache(config, 24, 4, "h2o" if config is latent else "keydiff", static=True)


def test_a_lone_pad_is_refused() -> None:
    model = models.shared("llama")
    models.need_masks_of_single_tokens(model)
    cache = pair(model)[1]
    ids, mask = TEXT, torch.ones_like(TEXT)
    mask[1, 30] = 0
    modes.forward(model, cache, ids, mask, 0, 30)
    with pytest.raises(ValueError, match="single token"):
        modes.forward(model, cache, ids, mask, 30, 31)
    # Together with what it stands before, it can be taken.
    modes.forward(model, cache, ids, mask, 30, 33)
    assert cache.get_seq_length() == 33
