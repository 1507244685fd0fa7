"""A cache that was saved and loaded, or pickled, goes on exactly as one that was not, to the last bit."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.cache.context import layer_state
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from policy_kinds import NAMES

OURS = "paged_eviction"


def make(model: Any, **settings: Any) -> PagedEvictionCache:
    return models.paged(model.config, **{"budget": 24, "block_size": 4, **settings})


def reload(cache: PagedEvictionCache, model: Any, folder: Path, **settings: Any) -> PagedEvictionCache:
    cache.save(folder / "context.safetensors")
    return PagedEvictionCache.load(folder / "context.safetensors", model.config, **settings)


def same(one: Any, other: Any, name: str = "") -> None:
    """Two states are equal, whatever they are made of."""
    assert type(one) is type(other), name
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, name
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), name
    elif hasattr(one, "__dataclass_fields__"):
        same(vars(one), vars(other), f"{name}.{type(one).__name__}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            same(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), name
        for place, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{name}.{place}")
    else:
        assert one == other, name


def parts(cache: PagedEvictionCache) -> list[Any]:
    return [layer_state(index, layer) for index, layer in enumerate(cache.layers)]


def go_on(model: Any, caches: list[Any], ids: Tensor, mask: Tensor, start: int, plan: tuple[int, ...]) -> None:
    """Feed the same columns to both and compare all logits and, at the end, all that they hold."""
    for count in plan:
        one, other = (modes.forward(model, cache, ids, mask, start, start + count) for cache in caches)
        assert torch.equal(one, other), f"columns {start} .. {start + count}"
        start += count
    for cache in caches:
        if cache.paged_layers[0][1].record_past:
            cache.crop(0)
    same(*map(parts, caches))


def run(
    model: Any, folder: Path, padded: bool, before: tuple[int, ...], after: tuple[int, ...], **settings: Any
) -> None:
    # The pads end before the first single token, which in a static cache may be none.
    lengths = [40, 33, 28] if padded else [40] * 3
    cache, (ids, mask) = make(model, **settings), models.left_pad(models.prompts(lengths, seed=1))
    more = torch.stack(models.prompts([sum(before) + sum(after)] * len(ids), seed=3))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, more.shape[1])
    start = 0
    for count in before:
        modes.forward(model, cache, ids, mask, start, start + count)
        start += count
    again = reload(cache, model, folder)
    same(parts(cache), parts(again))
    go_on(model, [cache, again], ids, mask, start, after)


#: A prompt that fills the cache, and single tokens into the middle of a block.
BEFORE = (40, 1, 1, 1)


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_goes_on(tmp_path: Path, policy: str) -> None:
    static = len(policy) % 2 == 0
    run(models.shared("llama", OURS), tmp_path, True, BEFORE, (1, 1, 6, 1), policy=policy, static=static)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", [*models.FAMILIES, *models.SHARED, *models.LINEAR_AND_FULL])
def test_every_family_goes_on(tmp_path: Path, family: str, static: bool) -> None:
    reason = models.unavailable(family)
    if reason:
        pytest.skip(reason)
    model = models.shared(family)
    settings = {"policy": "keydiff"} if family == "deepseek_v3" else {}
    try:
        make(model, static=static)
    except ValueError as error:
        if static and "static=True" in str(error):
            pytest.skip(str(error))
    except UserWarning:
        pytest.skip("nothing to evict")
    if family == "mistral_sliding":
        pytest.skip("no layer evicts")
    run(model, tmp_path, not static, (30, 1), (1, 1, 5, 1), static=static, **settings)


def test_bfloat16(tmp_path: Path) -> None:
    model = models.build("llama", OURS).to(torch.bfloat16)
    run(model, tmp_path, True, BEFORE, (7, 1, 1, 1, 1, 9, 1), policy="h2o")


def test_what_was_shrunk_cropped_and_offloaded(tmp_path: Path) -> None:
    model = models.shared("llama", OURS)
    cache, (ids, mask) = make(model, budget=40, policy="h2o"), modes.batch("greedy", True)
    modes.forward(model, cache, ids, mask, 0, 30)
    cache.crop(-3)
    cache.shrink(20)
    for layer in cache.layers:
        layer.offload()
    again = reload(cache, model, tmp_path)
    for layer in cache.layers:
        layer.prefetch()
    assert again.budget == 20
    more, whole = torch.cat([ids, ids], dim=1), modes.extend(mask, ids.shape[1])
    go_on(model, [cache, again], more, whole, 27, (1, 1, 1, 1, 1, 1, 8, 1))
    for one in (cache, again):
        one.reset()
    go_on(model, [cache, again], more, whole, 0, (40, 1))


def test_saving_and_loading_change_nothing(tmp_path: Path) -> None:
    """Neither the cache, nor anything that two loaded caches share; inference mode makes no difference."""
    model = models.shared("llama", OURS)
    cache, (ids, mask) = make(model, policy="h2o"), modes.batch("greedy", True)
    with torch.inference_mode():
        modes.forward(model, cache, ids, mask, 0, 38)
        before = copy.deepcopy(parts(cache))
        again = reload(cache, model, tmp_path)
    same(parts(cache), before)
    other = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    modes.forward(model, again, ids, mask, 38, 40)
    same(parts(other), before)
    assert [path.name for path in tmp_path.iterdir()] == ["context.safetensors"]


def test_compiled_steps_go_on(tmp_path: Path) -> None:
    """The same graph serves the loaded cache."""
    torch._dynamo.reset()
    model = models.build("llama", OURS, num_hidden_layers=1)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="eager")
    ids, mask = modes.batch("greedy", False)
    cache = make(model, static=True, policy="h2o")
    modes.forward(model, cache, ids, mask, 0, 40)

    def decode(cache: PagedEvictionCache, count: int) -> Tensor:
        chunks = []
        for at in range(count):
            cache.prepare_step()
            with torch.no_grad():
                ids = torch.full((3, 1), 5 + at)
                positions = torch.full((3, 1), cache.get_seq_length())
                chunks.append(
                    step(input_ids=ids, position_ids=positions, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
                )
        return torch.cat(chunks, dim=1)

    decode(cache, 6)
    again = reload(cache, model, tmp_path)
    assert torch.equal(decode(again, 9), decode(cache, 9))
    same(parts(cache), parts(again))


@pytest.mark.parametrize("static", [False, True])
def test_one_context_serves_different_questions(tmp_path: Path, static: bool) -> None:
    """Answers are those of each question alone, whatever the others are."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([40], seed=2))
    make_one = make(model, static=static, policy="h2o")
    modes.forward(model, make_one, ids, mask, 0, 40)
    make_one.save(tmp_path / "context.safetensors", input_ids=ids)
    questions = models.prompts([5, 9, 2, 7], seed=6)

    def answers(questions: list[Tensor]) -> list[list[int]]:
        question, real = models.left_pad(questions)
        texts = torch.cat([ids.expand(len(questions), -1), question], dim=1)
        cache = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config, input_ids=texts)
        cache.batch_repeat_interleave(len(questions))
        inputs = cache.follow_up(question, real)
        assert inputs["attention_mask"][:, :40].all()
        output = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, do_sample=False)
        return output[:, inputs["input_ids"].shape[1] :].tolist()

    assert answers(questions) == [answers([question])[0] for question in questions]


def test_padded_contexts_keep_their_pads(tmp_path: Path) -> None:
    model = models.shared("llama", OURS)
    cache, (ids, mask) = make(model, budget=64), modes.batch("greedy", True)
    modes.forward(model, cache, ids, mask, 0, 40)
    again = reload(cache, model, tmp_path)
    question = torch.stack(models.prompts([6] * 3, seed=8))
    inputs = again.follow_up(question)
    assert torch.equal(inputs["attention_mask"], modes.extend(mask, 6))
    full = torch.cat([ids, question], dim=1)
    assert torch.equal(
        modes.generate(model, again, inputs["input_ids"], inputs["attention_mask"], 6)[:, 46:],
        modes.generate(model, modes.dynamic(model), full, modes.extend(mask, 6), 6)[:, 46:],
    )


@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_one_of_many_rows(heads: str, tmp_path: Path) -> None:
    """Rows are full at different columns, and the cache remembers those of the rows that were dropped, too."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40, 33, 9, 21, 30, 17, 25, 5]))
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, heads=heads)
    modes.forward(model, cache, ids, mask, 0, 10)
    for at in range(10, 32):
        modes.forward(model, cache, ids, mask, at, at + 1)
    cache.batch_select_indices(torch.tensor([3]))
    cache.save(tmp_path / "row.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "row.safetensors", model.config)
    tables = [one.layers[0].state.known.counters for one in (cache, loaded)]
    assert tables[0] == tables[1]
    for at in range(32, 40):
        logits = [modes.forward(model, one, ids[3:4], mask[3:4], at, at + 1) for one in (cache, loaded)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("write", [pickle.dumps, torch.save], ids=["pickle", "torch"])
def test_what_was_pickled_goes_on(write: Any) -> None:
    """With tensors of its own."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([46, 30, 39]))
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="recency")
    modes.forward(model, cache, ids, mask, 0, 30)
    file = io.BytesIO()
    if write is torch.save:
        torch.save(cache, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(cache))
    assert not {layer.keys.data_ptr() for layer in twin.layers} & {layer.keys.data_ptr() for layer in cache.layers}
    for at in range(30, 40):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits), at
    twin.release()
    assert modes.forward(model, twin, ids, mask, 0, 30).isfinite().all()
