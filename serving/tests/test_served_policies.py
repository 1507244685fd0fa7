"""Every policy that serving takes gives what it gives alone, with the heads that it was published with and others."""

from typing import Any

import pytest

import driving
from driving import batching, held_alone, model_of, pool, texts
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.policies import make_policy
from hf_paged_eviction_serving.options import ServingOptions
from policy_kinds import NAMES

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4}
#: Sets of 12 to 68 tokens, of which some are not full when the prompt of 70 has been read.
HEADS = Heads.of([[0.3, 1.7], [1.4, 0.6]])
#: Prompts that fit, that overflow in one chunk and in several; answers that overwrite several blocks.
REQUESTS = tuple(zip(texts((25, 33, 70, 1, 48)), (13, 6, 7, 2, 6), strict=True))


def served() -> list[str]:
    """Names of all policies that serving does not refuse, as the registry knows them."""
    names = []
    for name in NAMES:
        try:
            ServingOptions(model_of().config, policy=name, **OPTIONS)
        except ValueError:
            needs = make_policy(name).needs
            assert needs.by_probe or needs.decision_interval > 1, name
        else:
            names.append(name)
    return names


#: One that looks at keys, at places, at all queries, at a window, and one that is compared; all under `--all-cases`.
FEW = ("keydiff", "streaming_llm", "h2o", "snapkv", "paged_eviction")
OF_EACH_KIND = [pytest.param(name, marks=() if name in FEW else pytest.mark.all_cases) for name in served()]


def check(
    options: dict[str, Any], budgets: tuple[int | None, ...] = (None,) * len(REQUESTS), few: bool = False
) -> None:
    """Tokens and what every layer and head holds in the end are those of the cache alone, whatever runs beside.

    Args:
        few: only a prompt that overflows in one chunk and one that does in several.
    """
    requests = list(zip(REQUESTS, budgets, strict=True))[slice(1, 3) if few else slice(None)]
    longest, its_budget = max(requests, key=lambda request: len(request[0][0]))
    model, config = model_of(), pool(12)
    with batching(model, config, **options) as turned:
        schedule = {3 * at: [adding(str(at), *request, budget)] for at, (request, budget) in enumerate(requests)}
        held = turned.last_held(str(requests.index((longest, its_budget))), schedule)
        turned.run()
        assert turned.free == 12
    if options["policy"] == "auto":  # the cache alone may take an allocator that is not served
        options = options | {"allocator": "uniform"}
    own = [options | ({} if budget is None else {"budget": budget}) for _, budget in requests]
    alone = [held_alone(model, *request, **changed) for (request, _), changed in zip(requests, own, strict=True)]
    for at, settings in enumerate(own):
        assert turned.most_pages[str(at)] <= -(-settings["budget"] // config.page_size)
    assert [turned.answers[str(at)] for at in range(len(requests))] == [tokens for tokens, _ in alone]
    assert held == [in_order(layer) for _, layer in alone[requests.index((longest, its_budget))][1].paged_layers]


def in_order(layer: Any) -> list[list[int]]:
    """Positions by set, in the logical order of its slots."""
    table = layer.table
    order = table.phase.order
    positions = table.positions[0] if order is None else table.positions.gather(-1, order)[0]
    return [[at for at in tokens if at >= 0] for tokens in positions.tolist()]


@pytest.mark.each_value_once
@pytest.mark.parametrize("heads", ["separate", "shared"])
@pytest.mark.parametrize("policy", served())
def test_as_alone(policy: str, heads: str) -> None:
    check(OPTIONS | {"policy": policy, "heads": heads}, few=policy not in FEW)


def test_the_default_as_alone() -> None:
    check(OPTIONS | {"policy": "auto"})


@pytest.mark.parametrize("policy", OF_EACH_KIND)
def test_unequal_shares(policy: str) -> None:
    check(OPTIONS | {"policy": policy, "allocator": HEADS}, few=True)


@pytest.mark.parametrize("policy", ["keydiff", "paged_eviction", "snapkv"])
def test_unequal_layers(policy: str) -> None:
    check(OPTIONS | {"policy": policy, "allocator": "pyramid"}, few=True)


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 48, "recent_tokens": 13, "sink_tokens": 2},
        {"budget": 40, "block_size": 8},
        {"block_size": 1, "sink_tokens": 1},
        {"prefill_chunk_size": 7},
        {"prefill_chunk_size": 1},
    ],
)
@pytest.mark.parametrize("policy", ["keydiff", "h2o"])
def test_unequal_shares_of_other_sizes(policy: str, changes: dict[str, Any]) -> None:
    check(OPTIONS | {"policy": policy, "allocator": HEADS} | changes, few=True)


@pytest.mark.each_value_once
@pytest.mark.parametrize("shares", ["separate", "shared", HEADS, "pyramid"])
@pytest.mark.parametrize("policy", OF_EACH_KIND)
def test_budgets_of_requests(policy: str, shares: Any) -> None:
    """Each has its own, up to that of all."""
    options = {"heads": shares} if shares in ("separate", "shared") else {"allocator": shares}
    check({"budget": 48, "block_size": 4, "policy": policy} | options, (None, 24, 36, 20, 24))


def test_budgets_of_requests_in_other_chunks() -> None:
    options = {"budget": 40, "block_size": 8, "policy": "h2o", "prefill_chunk_size": 7}
    check(options, (24, 32, None, None, 32))


@pytest.mark.each_value_once
@pytest.mark.parametrize("changes", [{}, {"block_size": 8, "budget": 40}, {"prefill_chunk_size": 1, "sink_tokens": 1}])
@pytest.mark.parametrize("bits", [8, 4, (4, 2), 3])
@pytest.mark.parametrize("shares", ["separate", "shared", HEADS, "pyramid"])
@pytest.mark.parametrize("policy", OF_EACH_KIND)
def test_few_bits(policy: str, shares: Any, bits: Any, changes: dict[str, Any]) -> None:
    options = {"heads": shares} if shares in ("separate", "shared") else {"allocator": shares}
    check(OPTIONS | {"policy": policy, "bits": bits} | options | changes, (None, 24, 32, None, 24))


def test_budgets_are_not_without_effect() -> None:
    """The control: fewer tokens, and fewer pages."""
    answers, pages = [], []
    for budget in (None, 48, 32, 16):
        with batching(model_of(), pool(12), budget=48, block_size=4, policy="keydiff") as turned:
            turned.add("0", *REQUESTS[2], budget=budget)
            turned.run()
            answers.append(turned.answers["0"])
            pages.append(turned.most_pages["0"])
    assert answers[0] == answers[1] != answers[2] != answers[3]
    assert pages == [3, 3, 2, 1]


def adding(name: str, prompt: list[int], new: int, budget: int | None) -> Any:
    return lambda turned: turned.add(name, prompt, new, budget=budget)


def test_policies_of_both_kinds_are_served() -> None:
    assert {make_policy(name).needs.heads for name in served()} == {"shared", "separate"}


def test_shares_are_not_without_effect() -> None:
    """The controls: other tokens, and the same pages, of which sets have unequal parts."""
    model, (prompt, new) = model_of(), REQUESTS[2]
    options = OPTIONS | {"policy": "keydiff", "heads": "separate"}
    answers, counts, pages = [], [], []
    for allocator in ("uniform", HEADS, "pyramid"):
        with batching(model, pool(12), **options, allocator=allocator) as turned:
            turned.add("0", prompt, new)
            counts.append(sorted(len(tokens) for layer in turned.last_held("0") for tokens in layer))
            answers.append(turned.answers["0"])
            pages.append(turned.most_pages["0"])
    assert answers[0] != answers[1] != answers[2]
    assert pages[0] == pages[1] == pages[2]
    assert {sum(row) for row in counts} == {4 * 32}
    assert len(set(counts[0])) == 1 < len(set(counts[1]))
