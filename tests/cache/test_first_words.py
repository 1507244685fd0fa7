"""What a user meets first: defaults that work everywhere, and messages that carry the way out."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import models
import modes
from evicting import check
from hf_paged_eviction import CacheOptions, PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_nothing_but_a_budget_on_latents(padded: bool) -> None:
    """The norms that decide elsewhere say nothing of latents."""
    model = models.shared("deepseek_v3")
    assert PagedEvictionCache(model.config, budget=64).policy.name == "keydiff"
    assert "policy=keydiff" in repr(PagedEvictionCache(model.config, budget=64))
    check("deepseek_v3", "sdpa", "direct", padded, policy="auto")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("policy", ["expected_attention", "compactor"])
def test_the_line_that_fixes_it(policy: str, family: str) -> None:
    config = models.shared(family).config
    if family == "deepseek_v3":
        with pytest.raises(ValueError, match="'keydiff'"):
            PagedEvictionCache(config, budget=64, policy=policy)
        return
    with pytest.raises(ValueError, match=r"uses 'sdpa'") as error:
        PagedEvictionCache(config, budget=64, policy=policy)
    assert "    model.set_attn_implementation('paged_eviction')" in str(error.value).splitlines()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"polcy": "keydiff"}, "'polcy'.*'policy'"), ({"window": 4}, "'window'.*config, budget, block_size")],
)
def test_an_argument_that_does_not_exist(wrong: dict[str, Any], words: str) -> None:
    config = models.shared("llama").config
    with pytest.raises(TypeError, match=f"PagedEvictionCache has no argument {words}"):
        PagedEvictionCache(config, budget=64, **wrong)
    with pytest.raises(TypeError, match=f"CacheOptions has no argument {words.partition('.*')[0]}"):
        CacheOptions(budget=64, **wrong)


def test_new_tokens_after_nothing() -> None:
    cache = PagedEvictionCache(models.shared("llama").config, budget=64, policy="keydiff")
    with pytest.raises(ValueError, match="read no text"):
        cache.follow_up(torch.ones(1, 3, dtype=torch.long))


def test_a_later_turn_takes_tokens_and_new_ones_alone() -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=64, policy="keydiff")
    ids = torch.ones(1, 5, dtype=torch.long)
    output = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=3, return_dict_in_generate=True)
    for wrong in (BatchEncoding({"input_ids": ids}), output, [[1, 2]]):
        with pytest.raises(TypeError, match=rf"{type(wrong).__name__}.*encoding\.input_ids"):
            cache.follow_up(wrong)
    with pytest.raises(TypeError, match="attention_mask must be a tensor"):
        cache.follow_up(ids, [[1]])
    with pytest.warns(UserWarning, match="8 tokens.*seen 7.*new tokens alone") as caught:
        cache.follow_up(output.sequences)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.follow_up(ids)["input_ids"].shape == (1, 12)


def test_what_is_said_without_a_profile_is_short() -> None:
    """The longest there is: the weights are not known, and another default would be better."""
    config = copy.deepcopy(models.shared("llama").config)
    with pytest.warns(UserWarning, match="There is no profile.*keydiff.*prepare") as caught:
        PagedEvictionCache(config, budget=64)
    assert len(str(caught[0].message).split()) <= 60 and caught[0].filename == __file__


def test_generate_that_feeds_the_whole_text_again() -> None:
    """Of a batch with pads the mask shows it, which is too short."""
    model = models.shared("llama")
    ids, mask = modes.batch("greedy", True)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    with pytest.raises(ValueError, match=r"41.*use_cache=False.*cache\.reset\(\)"):
        modes.generate(model, cache, ids, mask, 3, use_cache=False)


def test_generate_that_feeds_the_whole_text_again_without_pads() -> None:
    """No mask comes then; the length of the second forward is what is left to tell it by."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40]))
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    with pytest.warns(UserWarning, match=r"40 tokens were read, and a forward of 41.*use_cache=False") as caught:
        modes.generate(model, cache, ids, mask, 4, use_cache=False)
    assert len([one for one in caught if "use_cache=False" in str(one.message)]) == 1


def test_text_of_its_own_that_is_one_token_longer(recwarn: pytest.WarningsRecorder) -> None:
    """In a loop of one's own, and where `generate` was handed the cache and went on by a token."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40]))
    long, longer = ids.repeat(1, 3), mask.repeat(1, 3)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    modes.forward(model, cache, long, longer, 0, 40)
    modes.forward(model, cache, long, longer, 40, 81)
    cache.reset()
    modes.generate(model, cache, ids, mask, 3)
    modes.forward(model, cache, long, longer, 42, 85)
    assert not [one for one in recwarn if "use_cache=False" in str(one.message)]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "falcon_h1", "zamba2"])
@pytest.mark.parametrize("forget", ["reset", "release"])
def test_another_number_of_rows(family: str, forget: str) -> None:
    """Linear states of the last batch do not stand in the way of the next."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family)
    used, fresh = (PagedEvictionCache(model.config, budget=24, block_size=4) for _ in "ab")
    for lengths in ([30], [40, 33, 9], [21, 17]):
        ids, mask = models.left_pad(models.prompts(lengths, seed=len(lengths)))
        stop = ids.shape[1]
        for start, end in ((0, stop - 5), *((at, at + 1) for at in range(stop - 5, stop))):
            logits: list[Any] = [modes.forward(model, one, ids, mask, start, end) for one in (used, fresh)]
            assert torch.equal(*logits)
        getattr(used, forget)()
        fresh = PagedEvictionCache(model.config, budget=24, block_size=4)
