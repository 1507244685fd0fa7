"""Recall: nothing is lost, and what is attended to is what was chosen."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import models
import modes
import rows
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.parts import Part, join, read
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction_lab.recall import Recall, traffic
from hf_paged_eviction_lab.recall.summaries import Summaries
from reference import Recorder, assert_exact

OURS = "paged_eviction"
BLOCK = 4
ONE: dict[str, Any] = {"budget": 24, "block_size": BLOCK, "policy": "keydiff", "disposal": "recall(blocks=2)"}


def fetched(cache: PagedEvictionCache) -> int:
    return traffic(cache).faults


# ---- what was chosen -------------------------------------------------------------------------------------------------


class RecallRecorder(Recorder):
    """Notes what was visible after blocks came back; and checks that the blocks a query needs did.

    Args:
        blocks: that a single query asks for; "all" = everything is visible.
    """

    def __init__(self, model: Any, cache: Any, blocks: int | str, *, summary: str = "box") -> None:
        super().__init__(model, cache, poison=True)
        self.blocks, self.summary = blocks, summary
        self.checked = 0

    def __enter__(self) -> RecallRecorder:
        super().__enter__()
        for index, layer in self.cache.paged_layers:
            self._replace(layer, "extra_attention", self._follow(index, layer, layer.extra_attention))
        return self

    def _follow(self, index: int, layer: Any, beside: Any) -> Any:
        def followed(queries: Any, values: Tensor) -> Any:
            parts = beside(queries, values)
            if len(self.new) == 1 and self.blocks != "all":
                self._note_single(index, layer, queries.query)
            else:
                self._note_all(index, layer)
            return parts

        return followed

    def _note_all(self, index: int, layer: Any) -> None:
        first_new = len(self.columns) - len(self.new)
        rows, heads = len(self.columns[0].real), layer.keys.shape[1]
        for offset, column in enumerate(self.new):
            seen = range(first_new + offset + 1)
            column.visible[index] = [
                [{c for c in seen if self.columns[c].real[row]} for _ in range(heads)] for row in range(rows)
            ]

    def _note_single(self, index: int, layer: Any, query: Tensor) -> None:
        (column,) = self.new
        held = self._held_columns(layer, layer.keys.shape[:2])
        newest = len(self.columns) - 1
        for row, real in enumerate(column.real):
            if real:
                for head in held[row]:
                    head.add(newest)
        column.visible[index] = held
        action = layer.action
        if action.archive is None or action.leader is not None:
            return
        heads = layer.keys.shape[1]
        for row, real in enumerate(column.real):
            own = [c for c in self.columns if c.real[row]]
            taken_in = len(own) - (1 if layer.state.waiting else 0)
            if not real or taken_in <= layer.budget.tokens:
                continue
            scores = self._slow_scores(index, own[: taken_in // BLOCK * BLOCK], row, query[row, :, 0], heads)
            protected = layer.budget.protected_blocks
            candidates = range(protected, taken_in // BLOCK - 1)
            for own_set in [range(heads)] if layer.heads == "shared" else [[head] for head in range(heads)]:
                means = {n: sum(scores[head][n] for head in own_set) / len(own_set) for n in candidates}
                positions = set(layer.positions[row, own_set[0]].tolist())
                whole = {n for n in candidates if set(range(n * BLOCK, (n + 1) * BLOCK)) <= positions}
                best = sorted(means.values(), reverse=True)[: self.blocks]
                worth = max((abs(score) for score in means.values()), default=0) * 2e-3
                for n, score in means.items():  # rounding may choose another of nearly equal ones
                    assert n in whole or score <= best[-1] + worth, "a block that the query needs is missing"
                self.checked += 1

    def _slow_scores(self, index: int, own: list[Any], row: int, query: Tensor, heads: int) -> list[list[float]]:
        scores = []
        for head in range(heads):
            group = query.view(heads, -1, query.shape[-1])[head].tolist()
            keys = self.keys_of(index, own)[row, head].tolist()
            blocks = [keys[at : at + BLOCK] for at in range(0, len(keys), BLOCK)]
            scores.append([sum(self._slow_score(q, block) for q in group) / len(group) for block in blocks])
        return scores

    def keys_of(self, index: int, columns: list[Any]) -> Tensor:
        """`[rows, heads, n, dim]`, which blocks are summed up from."""
        return torch.stack([column.keys[index] for column in columns], dim=2)

    def _slow_score(self, query: list[float], block: list[list[float]]) -> float:
        total = 0.0
        for channel, q in enumerate(query):
            high, low = (choose(key[channel] for key in block) for choose in (max, min))
            total += max(q * high, q * low) if self.summary == "box" else q * (0.6 * high + 0.4 * low)
        return total


MODES = ("beam", "chunked_prefill", "three_turns", "direct", "assisted")
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"heads": "separate"},
    "vector": {"disposal": "recall(blocks=2, summary=vector)"},
    "all": {"disposal": "recall(blocks=all)"},
    "most": {"budget": 32, "disposal": "recall(blocks=5)", "heads": "separate"},
    "recording": {"record_past": True, "disposal": "recall(blocks=2)"},
}


#: Every way meets every third mode, full and padded by turns.
CASES = [
    (way, mode, (row + column) % 2 == 0)
    for row, way in enumerate(WAYS)
    for column, mode in enumerate(MODES)
    if (row + column) % 3 == 0
]


@pytest.mark.parametrize(("way", "mode", "padded"), CASES)
def test_exact(way: str, mode: str, padded: bool) -> None:
    """Equal to a plain masked reference of what was visible; and the blocks that a query needs were visible."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{**ONE, **WAYS[way]})
    blocks = cache.disposal.blocks
    with RecallRecorder(model, cache, blocks, summary=cache.disposal.summary) as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert_exact(model, recorder)
    assert cache.stats().evicted_tokens > 0
    assert fetched(cache) > 0 or blocks == "all" or mode in modes.SPECULATIVE
    assert recorder.checked > 0 or blocks == "all" or mode in modes.SPECULATIVE


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        *((family, "2") for family in ("gemma3", "gemma2", "gpt_neox", "lfm2")),
        *((family, "all") for family in ("gemma2", "gpt_oss", "qwen3")),
    ],
)
def test_families(family: str, blocks: str) -> None:
    """Soft-capping, sinks, sliding windows beside, a linear state beside."""
    if reason := models.unavailable(family) or models.recurrence_differs(family, "direct", True):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    cache = models.paged(model.config, **{**ONE, "disposal": f"recall(blocks={blocks})"})
    with RecallRecorder(model, cache, cache.disposal.blocks) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert_exact(model, recorder)
    assert cache.stats().evicted_tokens > 0


# ---- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "padded"),
    [("sampling", True), ("beam", True), ("return_sequences", False), ("chunked_prefill", True), ("two_turns", False)],
)
def test_all_is_a_dynamic_cache(mode: str, padded: bool) -> None:
    model = models.shared("llama", OURS)
    inputs = modes.batch(mode, padded)
    cache = models.paged(model.config, **{**ONE, "budget": 16, "disposal": "recall(blocks=all)"})
    expected = modes.run(model, DynamicCache(config=model.config), mode, *inputs)
    assert modes.run(model, cache, mode, *inputs).tolist() == expected.tolist()
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_budget_that_holds_the_text_changes_no_bit(padded: bool) -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", padded)
    logits = []
    for cache in (DynamicCache(config=model.config), models.paged(model.config, **{**ONE, "budget": 64})):
        spans = [(0, 20), *((at, at + 1) for at in range(20, 31)), (31, 40)]
        chunks = [modes.forward(model, cache, ids, mask, start, stop) for start, stop in spans]
        logits.append(torch.cat(chunks, dim=1)[mask.bool()])
    assert torch.equal(*logits)
    assert traffic(cache).host_bytes == cache.stats().summary_bytes == fetched(cache) == 0


@pytest.mark.parametrize(("every", "turns"), [(1, [10, 2, 6]), (3, None), (4, [10, 2, 6])], ids=str)
def test_a_row_is_what_it_is_alone(every: int, turns: list[int] | None) -> None:
    """The same blocks come back, at every step."""
    model = models.shared("llama", OURS)
    disposal = Recall(blocks=2, every=every, keep=0.5 if every == 4 else 1.0)
    lengths = [40, 33, 12]
    assert (
        rows.compare(model, lengths, turns, **{**ONE, "disposal": disposal, "heads": "shared" if turns else "separate"})
        > 0
    )


def test_a_row_that_pauses_goes_on_as_if_it_had_not() -> None:
    """One column in which some rows have a pad."""
    model = models.shared("llama", OURS)
    texts = models.prompts([60, 60], seed=3)
    cache, alone = (models.paged(model.config, **{**ONE, "disposal": "recall(blocks=2, every=3)"}) for _ in "ab")
    ids = torch.stack(texts)
    ids = torch.cat([ids[:, :45], torch.tensor([[0], [7]]), ids[:, 45:]], dim=1)
    mask = torch.ones_like(ids)
    mask[0, 45] = 0
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 61))]:
        steps = modes.forward(model, cache, ids, mask, start, stop)
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 60))]:
        own = modes.forward(model, alone, texts[0][None], torch.ones(1, 60, dtype=torch.long), start, stop)
    assert_close(steps[0], own[0])
    for (_, layer), (_, other) in zip(cache.paged_layers, alone.paged_layers, strict=True):
        assert sorted(layer.positions[0, 0].tolist()) == sorted(other.positions[0, 0].tolist())


def test_a_choice_lasts_as_long_as_was_said() -> None:
    """Between two choices nothing comes back."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{**ONE, "disposal": "recall(blocks=2, every=5)"})
    text, mask = torch.stack(models.prompts([90], seed=3)), torch.ones(1, 90, dtype=torch.long)
    came, before = [], 0
    for start, stop in [(0, 40), *((at, at + 1) for at in range(40, 90))]:
        modes.forward(model, cache, text, mask, start, stop)
        came.append(fetched(cache) - before)
        before = fetched(cache)
    assert sum(came) > 0
    assert all(count == 0 for at, count in enumerate(came[1:]) if at % 5)


def test_the_block_that_no_query_has_needed_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By frame: when a query last needed its block, or the block came, or was written; of several the oldest block."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=48, block_size=4, policy="keydiff", disposal="recall(blocks=2)")
    layer = cache.paged_layers[0][1]
    choose, steps = layer.action._choose, []

    def recorded(call: Any, archive: Any, frames: Any, due: Tensor) -> Any:
        choice = choose(call, archive, frames, due)
        pinned = frames.pinned(layer.action.site.sizes, call.table)
        chosen = {block for block in choice.ids[0, 0].tolist() if choice.chosen[0, 0, block]}
        steps.append(
            (int(frames.count), *(part[0, 0].tolist() for part in (frames.ids, frames.newest, pinned)), chosen)
        )
        return choice

    monkeypatch.setattr(layer.action, "_choose", recorded)
    text, mask = torch.stack(models.prompts([160], seed=3)), torch.ones(1, 160, dtype=torch.long)
    for start, stop in [(0, 70), *((at, at + 1) for at in range(70, 160))]:
        modes.forward(model, cache, text, mask, start, stop)
    wanted_at, swaps = [0] * len(steps[0][1]), 0
    for (now, ids, newest, pinned, chosen), (_, after, newest_after, *_) in pairwise(steps):
        wanted_at = [
            now if new or block in chosen else was for was, block, new in zip(wanted_at, ids, newest, strict=True)
        ]
        filled = {at for at in range(len(ids)) if newest[at] or newest_after[at]}
        came = {at for at, block in enumerate(after) if block != ids[at]} - filled
        if newest == newest_after:  # otherwise a victim was chosen besides
            free = [at for at, block in enumerate(ids) if not pinned[at] and block not in chosen]
            assert came == set(sorted(free, key=lambda at: (wanted_at[at], ids[at]))[: len(came)])
            swaps += len(came)
        wanted_at = [now if at in came else was for at, was in enumerate(wanted_at)]
    assert swaps > 20


@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_neighbouring_layers_use_one_choice(heads: str) -> None:
    model = models.build("llama", OURS, num_hidden_layers=4)
    cache = models.paged(model.config, **{**ONE, "disposal": "recall(blocks=2, layers=2)", "heads": heads})
    with RecallRecorder(model, cache, 2) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert_exact(model, recorder)
    layers = [layer for _, layer in cache.paged_layers]
    assert [layer.action.leader is None for layer in layers] == [True, False, True, False]
    assert [stats.summary_bytes > 0 for stats in cache.stats().layers] == [True, False, True, False]
    for leader, follower in (layers[:2], layers[2:]):
        (chosen, followed) = (layer.action._choice.chosen for layer in (leader, follower))
        assert torch.equal(chosen, followed) and chosen.any()
        for row, sets in enumerate(chosen.tolist()):
            for own_set, blocks in enumerate(sets):
                held = set(follower.positions[row, own_set].tolist())
                for block, wanted in enumerate(blocks):
                    assert not wanted or set(range(block * BLOCK, (block + 1) * BLOCK)) <= held
    assert not torch.equal(layers[0].action._choice.chosen, layers[2].action._choice.chosen)
    twin = copy.deepcopy(cache).paged_layers
    assert twin[1][1].action.leader is twin[0][1].action


@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_a_look_at_the_prompt_says_what_may_come_back(heads: str) -> None:
    """The share of each row's blocks that its last fifth of queries attended to most."""
    model, plain = models.shared("llama", OURS), models.shared("llama", "eager")
    lengths, budget = [60, 47, 41], 24
    ids, mask = models.left_pad(models.prompts(lengths, seed=3))
    cache = models.paged(
        model.config, **{**ONE, "budget": budget, "heads": heads, "disposal": "recall(blocks=2, keep=0.4)"}
    )
    modes.forward(model, cache, ids, mask, 0, 60)
    with torch.no_grad():
        attentions = plain(ids, attention_mask=mask, position_ids=models.positions_of(mask), output_attentions=True)
    for index, layer in cache.paged_layers:
        for row, length in enumerate(lengths):
            own = attentions.attentions[index][row, :, -length:, -length:].unflatten(0, (2, 2))
            mass = own[:, :, -math.ceil(0.2 * length) :].sum((1, 2))
            mass = mass.mean(0, keepdim=True) if heads == "shared" else mass
            whole = length // BLOCK
            blocks = mass[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).sum(-1)
            looked = layer.action._looked[row]
            count = math.ceil(0.4 * whole)
            assert looked[:, :whole].sum(-1).tolist() == [count] * len(blocks) and looked[:, whole:].all()
            for own_set, looked_at in enumerate(looked[:, :whole]):
                assert blocks[own_set][looked_at].min() >= blocks[own_set][~looked_at].max() - 1e-3
    looked = [layer.action._looked.clone() for _, layer in cache.paged_layers]
    more = torch.stack(models.prompts([20] * 3, seed=5))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, 20)
    for at in range(60, 80):
        modes.forward(model, cache, ids, mask, at, at + 1)
        for (_, layer), allowed in zip(cache.paged_layers, looked, strict=True):
            assert not (layer.action._choice.chosen[..., :15] & ~allowed[..., :15]).any()
    cache.reset()
    assert all(layer.action._looked is None for _, layer in cache.paged_layers)


def test_a_look_follows_its_rows() -> None:
    """While everything fits the budget, too."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{**ONE, "budget": 64, "disposal": "recall(blocks=2, keep=0.4)"})
    modes.forward(model, cache, *models.left_pad(models.prompts([40, 33, 12])), 0, 40)
    looked = [layer.action._looked for _, layer in cache.paged_layers]
    cache.batch_select_indices(torch.tensor([2, 0]))
    for (_, layer), before in zip(cache.paged_layers, looked, strict=True):
        assert layer.action.archive is None and torch.equal(layer.action._looked, before[[2, 0]])


# ---- what is where ---------------------------------------------------------------------------------------------------


def test_host_memory_has_everything_and_the_device_its_budget() -> None:
    model = models.shared("llama", OURS)
    text, mask = torch.stack(models.prompts([100] * 2, seed=3)), torch.ones(2, 100, dtype=torch.long)
    for summary, vectors in (("box", 2), ("vector", 1)):
        cache = models.paged(model.config, **{**ONE, "disposal": Recall(blocks=2, summary=summary)})
        for start, stop in [(0, 50), *((at, at + 1) for at in range(50, 99))]:
            modes.forward(model, cache, text, mask, start, stop)
        stats = cache.stats()
        per_token = 2 * 2 * 8 * 4 * 2  # rows, heads, width, float32, keys and values
        assert stats.storage_bytes == 2 * 24 * per_token
        stored, room = 24, 24 * 3 // 2  # the last block is copied when the next one begins
        assert 2 * stored * per_token // 2 * vectors <= stats.summary_bytes <= 2 * room * per_token // 2 * vectors
        assert 2 * stored * BLOCK * per_token <= traffic(cache).host_bytes <= 2 * room * BLOCK * per_token
        for _, layer in cache.paged_layers:
            assert layer.action.archive.stored.tolist() == [stored, stored]


def test_host_memory_has_the_bytes_of_a_dynamic_cache() -> None:
    model = models.shared("llama", OURS)
    text, mask = torch.stack(models.prompts([80] * 2, seed=3)), torch.ones(2, 80, dtype=torch.long)
    cache = models.paged(model.config, **{**ONE, "disposal": "recall(blocks=all)"})
    with Recorder(model, cache) as recorder:
        recorder._after = lambda _: None  # everything is visible: what the recorder notes does not hold
        for start, stop in [(0, 50), *((at, at + 1) for at in range(50, 80))]:
            modes.forward(model, cache, text, mask, start, stop)
    for index, layer in cache.paged_layers:
        stored = int(layer.action.archive.stored.min()) * BLOCK
        assert stored >= 76
        host = layer.action.archive.host
        for name, states in zip(("keys", "values"), host.parts(host.states), strict=True):
            came = torch.stack([getattr(column, name)[index] for column in recorder.columns[:stored]], dim=2)
            assert torch.equal(states.flatten(2, 3)[:, :, :stored], came)


def test_what_was_never_written_in_host_memory_is_never_read() -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", True)
    logits = []
    for poisoned in (False, True):
        cache = models.paged(model.config, **{**ONE, "disposal": "recall(blocks=all)"})
        chunks = []
        for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 40))]:
            chunks.append(modes.forward(model, cache, ids, mask, start, stop))
            for _, layer in cache.paged_layers if poisoned else ():
                host, stored = layer.action.archive.host, layer.action.archive.stored
                for row, blocks in enumerate(stored.tolist()):
                    host.states[row, :, blocks:] = math.nan
        logits.append(torch.cat(chunks, dim=1)[mask.bool()])
    assert torch.equal(*logits)


def test_a_budget_without_room_for_what_comes_back() -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **ONE)
    modes.forward(model, cache, *models.left_pad(models.prompts([30])), 0, 30)
    with pytest.raises(ValueError, match=r"16.*1 recalled"):
        cache.shrink(16)


# ---- summaries and joining -------------------------------------------------------------------------------------------

NUMBERS = st.floats(-8, 8, width=16)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_box_bounds_every_product(data: Any, size: int, width: int, dtype: torch.dtype) -> None:
    keys = torch.tensor(
        data.draw(st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=size, max_size=size))
    )
    query = torch.tensor(data.draw(st.lists(NUMBERS, min_size=width, max_size=width)))
    keys, query = keys.to(dtype), query.to(dtype)
    summaries = Summaries(2, keys[None, None])
    summaries.reserve(1)
    summaries.put(torch.tensor([0]), torch.tensor([0]), keys[None, None])
    bound = summaries.scores(query[None, None, None])[0, 0, 0]
    products = keys.double() @ query.double()
    assert bound.double() >= products.max() - 1e-5 * (1 + products.abs().max())


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_parts_joined_are_one_softmax(seed: int, sizes: list[int], capped: bool, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 2  # noqa: E731
    sizes = [*sizes, 2]
    query, logits = draw(2, 4, 3, 8), Logits(0.3, 4.0 if capped else None, draw(4) if sinks else None)
    parts = [
        Part(draw(2, 2, n, 8), draw(2, 2, n, 5), torch.where(draw(2, 1, 3, n) > -1, 0.0, float("-inf"))) for n in sizes
    ]
    whole = Part(
        *(
            torch.cat([getattr(part, name) for part in parts], dim)
            for name, dim in (("keys", 2), ("values", 2), ("bias", 3))
        )
    )
    joined = join((read(query, part, logits) for part in parts), logits)
    products = torch.einsum("bhgqd,bhnd->bhgqn", query.unflatten(1, (2, 2)), whole.keys) * 0.3
    if capped:
        products = 4 * (products / 4).tanh()
    products = (products + whole.bias[:, :, None]).flatten(1, 2)
    if sinks:
        products = torch.cat([products, logits.sinks[None, :, None, None].expand(2, -1, 3, 1)], dim=-1)
    weights = products.softmax(-1).nan_to_num(0.0)[..., : sum(sizes)]
    expected = weights @ whole.values.repeat_interleave(2, 1)
    assert_close(joined, expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"static": True}, "static=True"),
        ("llama", {"policy": "h2o"}, "the policy 'h2o'"),
        ("llama", {"allocator": "cake"}, "allocator='uniform'"),
        ("llama", {"budget": "50%"}, r"share.*budget"),
        ("llama", {"budget": "1MB"}, r"recall\(length=TOKENS\)"),
        ("llama", {"disposal": "recall(length=0)"}, r"length.*whole"),
        ("llama", {"positions": "cache"}, "positions='cache'"),
        ("llama", {"budget": 16}, r"20.*blocks=1"),
        ("llama", {"disposal": "recall(blocks=0)"}, r"blocks.*1"),
        ("llama", {"disposal": "recall(blocks=some)"}, "or \"all\", got 'some'"),
        ("llama", {"disposal": "recall(every=0)"}, "every must be"),
        ("llama", {"disposal": "recall(summary=ball)"}, "summary must be"),
        ("llama", {"disposal": "recall(keep=0)"}, r"keep.*\(0, 1\]"),
        ("llama", {"disposal": "recall(layers=none)"}, "layers must be"),
        ("llama", {"disposal": "recall(prefetch=-1)"}, r"prefetch.*0"),
        ("llama", {"disposal": "recall(blocks=all, prefetch=2)"}, "nothing to prefetch"),
        ("llama", {"disposal": "recall(size=3)"}, r"'recall\(size=3\)'"),
        ("deepseek_v3", {}, "latents"),
        ("gemma3n", {}, r"keys.*values"),
    ],
)
def test_refused(family: str, changes: dict[str, Any], message: str) -> None:
    if models.unavailable(family):
        pytest.skip(str(models.unavailable(family)))
    with pytest.raises(ValueError, match=message):
        models.paged(models.build(family, OURS).config, **{**ONE, **changes})


def test_another_attention_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"part.*attention"):
        models.paged(models.shared("llama").config, **ONE)
