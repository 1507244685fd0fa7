"""Victims of all alike layers are chosen at once: those that each layer would choose alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.layer.group import Group
from hf_paged_eviction.layer.plan import Plan
from policy_kinds import POLICIES

pytestmark = pytest.mark.contract

LAYERS = 4


@dataclass(frozen=True)
class ByLayer(EvictionPolicy):
    """Token-local, and another order in each layer and head, as a calibrated policy has."""

    name: ClassVar[str] = "by_layer"
    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        """A direction of the keys that turns from layer to layer."""
        heads = torch.arange(context.keys.shape[1])[:, None]
        return (context.keys[..., context.layer_idx] * (1 + heads)).sin() + context.values[..., 0]


def build(attention: str = "paged_eviction") -> Any:
    return models.build("llama", attention, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


def pair(model: Any, **settings: Any) -> tuple[PagedEvictionCache, PagedEvictionCache]:
    """A cache whose layers choose together, and one whose layers choose one by one."""
    together, apart = (models.paged(model.config, **{"budget": 24, "block_size": 4, **settings}) for _ in range(2))
    for _, layer in apart.paged_layers:
        layer.plan = Plan([layer.state], layer.padding)
    return together, apart


def assert_same(one: PagedEvictionCache, other: PagedEvictionCache) -> None:
    for index, layer in one.paged_layers:
        assert torch.equal(layer.positions, other.layers[index].positions), f"layer {index}"
        assert torch.equal(one.block_table(index), other.block_table(index)), f"layer {index}"
        assert torch.equal(layer.table.choice.evicted_blocks, other.layers[index].table.choice.evicted_blocks)
    assert one.stats().evicted_tokens == other.stats().evicted_tokens > 0


def compare(model: Any, run: Callable[[PagedEvictionCache], Tensor], **settings: Any) -> None:
    caches = pair(model, **settings)
    together, apart = (run(cache) for cache in caches)
    assert_close(together, apart)
    assert_same(*caches)


@contextmanager
def choices() -> Iterator[list[int]]:
    """How many rows each choice of victims was made for."""
    choose, rows = Group.choose_victims, []

    def counted(self: Group, *args: Any, **kwargs: Any) -> None:
        rows.append(self.table.rows)
        choose(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "choose_victims", counted)
        yield rows


def steps(model: Any, cache: Any, ids: Tensor, mask: Tensor, start: int, stop: int) -> Tensor:
    """Columns one at a time; their logits."""
    return torch.cat([modes.forward(model, cache, ids, mask, at, at + 1) for at in range(start, stop)], dim=1)


def text(padded: bool = True, width: int = 80) -> tuple[Tensor, Tensor]:
    return models.left_pad(models.prompts([width, width - 9, width - 37] if padded else [width] * 3, seed=2))


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", [*POLICIES, pytest.param(ByLayer(), id="by_layer")])
def test_every_policy(model: Any, policy: Any, heads: str) -> None:
    ids, mask = text(padded=heads == "shared" or policy == "paged_eviction")

    def run(cache: PagedEvictionCache) -> Tensor:
        modes.forward(model, cache, ids, mask, 0, 50)
        return steps(model, cache, ids, mask, 50, 59)

    compare(model, run, policy=policy, heads=heads)


def test_it_happens_once_for_all_layers(model: Any) -> None:
    ids, mask = text(padded=False)
    rows = {}
    for name, cache in zip(("together", "apart"), pair(model, policy="paged_eviction"), strict=True):
        modes.forward(model, cache, ids, mask, 0, 40)
        with choices() as rows[name]:
            steps(model, cache, ids, mask, 40, 60)
    assert rows["together"] == [3 * LAYERS] * 5  # 20 tokens in blocks of 4
    assert rows["apart"] == [3] * 5 * LAYERS


SHARES = Heads.of([[1.25, 0.75], [0.5, 1.0], [1.5, 1.0], [1.0, 1.0]])


#: Of layers: all of another size, or two and two.
LAYERS_ALONE = {"all": [[0.8], [0.9], [1.1], [1.2]], "pairs": [[0.8], [1.2], [0.8], [1.2]]}


@pytest.mark.parametrize("sizes", ["all", "pairs", "heads"])
def test_layers_of_different_sizes_choose_together(model: Any, sizes: str) -> None:
    ids, mask = text(padded=False)
    of_heads = {"allocator": SHARES, "heads": "separate", "policy": "keydiff"}
    of_layers = {"allocator": Heads.of(LAYERS_ALONE.get(sizes, [[1.0]])), "budget": 30 // 4 * 4}
    caches = pair(model, **(of_heads if sizes == "heads" else of_layers))
    logits, chosen_sets = [], []
    for cache in caches:
        modes.forward(model, cache, ids, mask, 0, 40)
        with choices() as chosen:
            logits.append(steps(model, cache, ids, mask, 40, 60))
        chosen_sets.append(set(chosen))
    assert torch.equal(*logits)
    assert_same(*caches)
    assert chosen_sets == [{3 * LAYERS}, {3}]
    assert len({layer.held for layer in caches[0].layers}) > 1


def test_a_look_at_one_layer_parts_it_for_one_turn(model: Any) -> None:
    ids, mask = text(padded=False)
    cache = pair(model, policy="keydiff")[0]
    modes.forward(model, cache, ids, mask, 0, 40)
    steps(model, cache, ids, mask, 40, 42)
    cache.block_scores(1)
    with choices() as rows:
        steps(model, cache, ids, mask, 42, 52)
    assert sum(rows) == 3 * LAYERS * 2
    assert rows[-1] == 3 * LAYERS


@pytest.mark.parametrize("static", [False, True])
def test_a_clock_around_every_choice(model: Any, static: bool) -> None:
    """For a cache that has already chosen, too; and it can be taken away again."""
    cache = models.paged(model.config, budget=24, block_size=4, static=static, policy="paged_eviction")
    ids, mask = text(padded=False, width=60)
    modes.forward(model, cache, ids, mask, 0, 30)
    steps(model, cache, ids, mask, 30, 33)
    entered: list[int] = []

    @contextmanager
    def clock() -> Iterator[None]:
        entered.append(cache.get_seq_length())
        yield

    plan = cache.layers[0].plan
    plan.surround(clock)
    steps(model, cache, ids, mask, 33, 48)
    assert entered == [34, 38, 42, 46]
    plan.surround(nullcontext)
    steps(model, cache, ids, mask, 48, 56)
    assert len(entered) == 4
