"""A model split over two processes evicts what it would evict in one (real processes, `tp_plan="auto"`)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.utils import is_accelerate_available

import models
import tensor_parallel
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.integration.heads import LocalHeads
from hf_paged_eviction.queries.observer import Queries
from processes import in_processes, reserved_port

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]

CASES = [(family, *case) for family in tensor_parallel.FAMILIES for case in tensor_parallel.cases(family)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split")
    tensor_parallel.save_models(path)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    """What the two processes answered."""
    if not is_accelerate_available():
        pytest.skip("transformers splits models with accelerate alone")
    # What torchrun would set.
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        return in_processes(2, tensor_parallel.answers_of_rank, folder, {**common, "MASTER_PORT": str(port)})


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process answers."""
    load, answers = tensor_parallel.load, tensor_parallel.answers
    return {family: answers(load(folder / family, parallel=False), family) for family in tensor_parallel.FAMILIES}


def test_heads_are_split_where_it_matters(ranks: list[Any], alone: dict[str, Any]) -> None:
    full = ("full", "", "")
    assert alone["llama"][full]["heads"] == 4
    for rank, _ in ranks:
        assert rank["llama"][full]["heads"] == 2
        assert rank["olmo2"][full]["heads"] == 4
        for family in tensor_parallel.FAMILIES:
            assert rank[family][full]["tokens"].equal(alone[family][full]["tokens"])


@pytest.mark.parametrize(("family", "policy", "heads", "allocator"), CASES)
def test_tokens_and_positions_are_those_of_one_process(
    ranks: list[Any], alone: dict[str, Any], family: str, policy: str, heads: str, allocator: str
) -> None:
    expected = alone[family][policy, heads, allocator]
    for rank, (by_family, _) in enumerate(ranks):
        answer = by_family[family][policy, heads, allocator]
        assert answer["tokens"].equal(expected["tokens"])
        first = rank * answer["heads"] if answer["heads"] < expected["heads"] else 0
        for held, whole in zip(answer["positions"], expected["positions"], strict=True):
            here = whole[:, first : first + answer["heads"]]
            # Where heads differ a layer has as many slots as the longest that is here.
            assert held.equal(here) if held.shape == here.shape else real(held) == real(here)


def real(positions: torch.Tensor) -> list[list[list[int]]]:
    """Of each row and head, in order of text."""
    return [[sorted(at for at in head if at >= 0) for head in heads] for heads in positions.tolist()]


def test_something_was_evicted_and_heads_differ(alone: dict[str, Any]) -> None:
    """What the comparison rests on: the halves of a layer would choose different tokens by themselves."""
    cases = alone["llama"]
    for policy in ("keydiff", "paged_eviction", "random"):
        held = cases[policy, "separate", "uniform"]["positions"][0]
        assert not held[:2, :2].equal(held[:2, 2:])
        assert not cases["full", "", ""]["tokens"].equal(cases[policy, "separate", "uniform"]["tokens"])


def test_shared_heads_in_two_processes_are_refused(ranks: list[Any]) -> None:
    for _, refused in ranks:
        assert "2 of the 4" in refused and "heads='separate'" in refused


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`world(size)` makes it look as if that many processes ran together; to communicate is a mistake."""

    def pretend(size: int, rank: int = 0) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda *args: size)
        monkeypatch.setattr(dist, "get_rank", lambda *args: rank)
        monkeypatch.setattr(dist, "all_gather", lambda *args, **kwargs: pytest.fail("something was sent"))

    return pretend


def feed(cache: PagedEvictionCache, kv_heads: int) -> None:
    for count in (40, *[1] * 9):
        states = torch.randn(1, kv_heads, count, 8)
        for index in range(len(cache.layers)):
            cache.update(states, states, index)
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "gpt2", "deepseek_v3"])
def test_copies_of_a_model_send_nothing(world: Any, family: str, size: int) -> None:
    """Data parallelism: other processes have other rows."""
    world(size)
    config = models.family_config(family)
    latents = family == "deepseek_v3"
    cache = PagedEvictionCache(config, budget=24, block_size=4, policy="keydiff")
    feed(cache, 1 if latents else getattr(config, "num_key_value_heads", config.num_attention_heads))


def test_layers_with_fewer_heads_than_the_rest_send_nothing(world: Any) -> None:
    world(2)
    try:
        config = models.AutoConfig.for_model(
            "gemma4_text",
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            num_attention_heads=4,
            num_key_value_heads=4,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            num_kv_shared_layers=0,
        )
    except ValueError:
        pytest.skip("gemma4 came with a later transformers")
    first, share = LocalHeads.of_layers(config, [0, 1]).values()
    assert share.processes(2) == 1
    assert first.total in (None, 4)


@pytest.mark.parametrize("size", [2, 4])
def test_heads_of_their_own_send_nothing(world: Any, size: int) -> None:
    world(size)
    config = models.family_config("llama")
    with pytest.raises(ValueError, match=r"1 of the 2.*separate"):
        feed(PagedEvictionCache(config, budget=24, block_size=4), 1)
    feed(PagedEvictionCache(config, budget=24, block_size=4, heads="separate"), 1)


@pytest.mark.parametrize("policy", ["tova", "adaptive(key_norm, recency)", "compactor"])
def test_what_mixes_heads_needs_all_of_them(world: Any, policy: str) -> None:
    """With heads of their own the scores stay here, but not what these policies make them of."""
    world(4)
    config = models.family_config("llama")
    config._attn_implementation = "paged_eviction"
    cache = PagedEvictionCache(config, budget=24, block_size=4, policy=policy, heads="separate")
    states = torch.randn(1, 1, 40, 8)
    keys, _ = cache.update(states, states, 0)
    with pytest.raises(ValueError, match=r"2 processes.*4"):
        cache.layers[0].attended(Queries(torch.randn(1, 2, 40, 8), keys, Logits(0.3)))


def test_shares_among_heads_are_refused(world: Any) -> None:
    world(2)
    config = models.family_config("llama")
    config._attn_implementation = "paged_eviction"
    cache = PagedEvictionCache(config, budget=24, block_size=4, allocator="ada_kv", heads="separate")
    states = torch.randn(1, 1, 40, 8)
    with pytest.raises(ValueError, match="'ada_kv'"):
        cache.update(states, states, 0)


def test_later_heads_know_their_number(world: Any) -> None:
    config = SimpleNamespace(num_key_value_heads=4, kv_lora_rank=None)
    config.get_text_config = lambda **_: config
    share = LocalHeads.of_layers(config, [0])[0]
    first_heads = []
    for rank in range(4):
        world(4, rank)
        first_heads.append((share.first_head(1), share.first_head(2), share.first_head(4)))
    assert first_heads == [(0, 0, 0), (1, 2, 0), (2, 0, 0), (3, 2, 0)]
