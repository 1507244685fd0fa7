"""Promise 1: as long as nothing has to go, the tokens are those of DynamicCache."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:No layer of this mistral model can evict")]

ROOMY = 160
#: Every mode has its turn: each family meets greedy decoding and four of the others.
THIN = {
    family: ["greedy", *(modes.MODES[1 + (4 * at + offset) % (len(modes.MODES) - 1)] for offset in range(4))]
    for at, family in enumerate(models.FAMILIES)
    if family != "llama"
}


@cache
def expected(family: str, attention: str, mode: str, padded: bool, seed: int) -> torch.Tensor:
    model = models.shared(family, attention)
    return modes.run(model, modes.dynamic(model), mode, *modes.batch(mode, padded, seed))


def roomy(model: object, mode: str = "", **settings: object) -> PagedEvictionCache:
    policy = {} if "deepseek" not in type(model).__name__.lower() else {"policy": "keydiff"}
    return models.paged(model.config, **{"budget": ROOMY, **policy, **settings})


def check(family: str, attention: str, mode: str, padded: bool, seed: int = 0, **settings: object) -> None:
    model = models.shared(family, attention)
    cache = roomy(model, mode, **settings)
    tokens = modes.run(model, cache, mode, *modes.batch(mode, padded, seed))
    assert tokens.tolist() == expected(family, attention, mode, padded, seed).tolist()
    assert cache.stats().evicted_tokens == 0
    assert cache.get_seq_length() > modes.LENGTHS[0]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_every_mode(mode: str, padded: bool, attention: str) -> None:
    check("llama", attention, mode, padded)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[] if mode == own[at % len(own)] else [pytest.mark.all_cases])
        for at, (family, own) in enumerate(THIN.items())
        for mode in own
    ],
)
def test_family(family: str, mode: str, padded: bool) -> None:
    if reason := models.unavailable(family) or models.cannot_crop(family, mode):
        pytest.skip(reason)
    check(family, "eager" if len(mode) % 2 else "sdpa", mode, padded)


@pytest.mark.parametrize("mode", ["greedy", "beam", "direct", "prompt_lookup"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(mode: str, dtype: torch.dtype) -> None:
    model = models.build("llama").to(dtype)
    inputs = modes.batch(mode, padded=True)
    ours = modes.run(model, roomy(model, mode), mode, *inputs)
    expected = modes.run(model, modes.dynamic(model), mode, *inputs)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("budget", [54, 56, 64])
def test_a_budget_of_just_the_length(budget: int) -> None:
    """The last token of a generate call is never fed: 40 + 15 - 1 columns."""
    model = models.shared("llama")
    ids, mask = modes.batch("greedy", padded=True)
    cache = models.paged(model.config, budget=budget, block_size=2, sink_tokens=2)
    ours = modes.generate(model, cache, ids, mask, 15)
    expected = modes.generate(model, modes.dynamic(model), ids, mask, 15)
    assert ours.tolist() == expected.tolist()
    assert cache.stats().evicted_tokens == 0


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_rows_that_end_early(padded: bool) -> None:
    """A finished row goes on with pads that generate marks as real tokens."""
    model = models.build("llama")
    ids, mask = modes.batch("greedy", padded)
    free = modes.run(model, modes.dynamic(model), "greedy", ids, mask)
    stop = {"eos_token_id": free[1, 3].item(), "min_new_tokens": 0, "max_new_tokens": 20, "do_sample": False}
    stop |= {"pad_token_id": models.PAD, "attention_mask": mask}
    ours = model.generate(ids, **{CACHE_ARGUMENT: roomy(model)}, **stop)
    expected = model.generate(ids, **{CACHE_ARGUMENT: modes.dynamic(model)}, **stop)
    assert ours.tolist() == expected.tolist()
    assert (ours == models.PAD).sum() > (ids == models.PAD).sum()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_bit_by_bit_while_nothing_goes(attention: str) -> None:
    model = models.shared("llama", attention)
    ids, mask = modes.batch("direct", padded=True)
    ours, dynamic = roomy(model), modes.dynamic(model)
    for start, stop in [(0, 11), (11, 13), (13, 14), (14, 30), (30, 31), (31, 40)]:
        pair = [modes.forward(model, one, ids, mask, start, stop) for one in (ours, dynamic)]
        assert torch.equal(*pair)


def test_mask_inferred_from_the_pad_id() -> None:
    """generate works the mask out by itself; nothing tells the cache but the model's own masks."""
    model = models.build("llama")
    model.generation_config.bos_token_id = 1
    ids, mask = modes.batch("greedy", padded=True)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": models.PAD, "eos_token_id": 1}
    ours = model.generate(ids, **{CACHE_ARGUMENT: roomy(model)}, **settings)
    expected = model.generate(
        ids, attention_mask=mask, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}, **settings
    )
    assert ours.tolist() == expected.tolist()


def test_output_attentions_follow_the_held_slots() -> None:
    model = models.shared("llama", "eager")
    ids, mask = modes.batch("greedy", padded=False)
    cache = models.paged(model.config, budget=24, block_size=4)
    out = model.generate(
        ids,
        attention_mask=mask,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=6,
        output_attentions=True,
        return_dict_in_generate=True,
        do_sample=False,
    )
    assert [step[0].shape[-1] for step in out.attentions] == [40, 24, 24, 24, 24, 24]
