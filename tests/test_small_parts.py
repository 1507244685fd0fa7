"""The parts that everything else stands on, each against a loop: ranks, pads, sizes, slots."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_paged_eviction.masks.padding import Padding
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.precision.few_bits import FewBits
from hf_paged_eviction.ranking import DROP, best_tokens, best_within, rank_keys, without_noise
from hf_paged_eviction.store.coders import Plain
from hf_paged_eviction.store.columns import Columns, gather_slots, slot_index
from hf_paged_eviction.store.store import Store
from hf_paged_eviction.store.tensors import byte_count
from hf_paged_eviction.table.budget import BlockBudget
from reference import rank

INF, NAN = math.inf, math.nan
QUICK = settings(max_examples=40)

# ---- ranks --------------------------------------------------------------------------------------------------------


def ranked(
    scores: list[float], positions: list[int], valid: list[bool] | None = None, absolute_noise: bool = False
) -> Tensor:
    """The keys of one head."""
    real = torch.tensor([[valid or [True] * len(scores)]])
    return rank_keys(torch.tensor([[scores]]), torch.tensor([[positions]]), real, absolute_noise)[0, 0]


def slow_levels(scores: list[float], valid: list[bool], absolute_noise: bool) -> list[int | None]:
    """The levels of the slow twin as whole numbers; None where a score is not valid."""
    real = [score for score, is_real in zip(scores, valid, strict=True) if is_real]
    infinite = 2**30 if absolute_noise else 255 * 4096
    levels = iter([level for level, _ in rank(real, [0] * len(real), absolute_noise)])
    return [int(max(-infinite, min(infinite, next(levels)))) if is_real else None for is_real in valid]


SCORES = st.lists(
    st.integers(-40, 40).map(lambda n: n / 8)
    | st.floats(width=32)
    | st.sampled_from([0.0, -0.0, 1e9, 2.0**-149, -(2.0**-149), 2.0**-126, 1.17e-38, 3.4028234663852886e38]),
    min_size=1,
)
#: Sums of the largest would be larger than any float32.
DIFFERENCES = st.lists(
    st.integers(-40, 40).map(lambda n: n / 8)
    | st.sampled_from([INF, -INF, NAN, 1e9, 2.0**127, -(2.0**127), 2.0**-100, 2.0**-149]),
    min_size=1,
)


@settings(max_examples=80)
@given(data=st.data(), absolute_noise=st.booleans())
def test_keys_are_those_of_the_loop(data: st.DataObject, absolute_noise: bool) -> None:
    """Pads are below everything, and their scores decide about no other."""
    scores = data.draw(DIFFERENCES if absolute_noise else SCORES)
    positions = data.draw(st.permutations(range(len(scores))))
    valid = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    expected = [
        DROP if level is None else level * 2**32 + position
        for level, position in zip(slow_levels(scores, valid, absolute_noise), positions, strict=True)
    ]
    assert ranked(scores, positions, valid, absolute_noise).tolist() == expected


def test_rows_and_heads_have_scales_of_their_own() -> None:
    scores = torch.tensor([[[1.0, 3.0], [100.0, 300.0]], [[1e-6, 3e-6], [0.0, 0.0]]])
    positions = torch.arange(2).expand(2, 2, 2)
    together = rank_keys(scores, positions, torch.ones(2, 2, 2, dtype=torch.bool), absolute_noise=True)
    assert (together[:, :, 0] < together[:, :, 1]).all()
    for row in range(2):
        for head in range(2):
            alone = ranked(scores[row, head].tolist(), [0, 1], absolute_noise=True)
            assert together[row, head].tolist() == alone.tolist()


def test_what_is_left_of_equal_numbers_is_nothing() -> None:
    differences = torch.tensor([1e-8, -1e-4, -1e-3, 0.1, INF, 7e-20, 1e38, 0.0])
    sizes = torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.0, 0.0, 0.0])
    cleaned = without_noise(differences, sizes).tolist()
    assert cleaned[:2] == [0.0, 0.0]
    assert cleaned[2:] == differences[2:].tolist(), "beside nothing, everything is large"


def test_best_tokens_are_ordered_by_position() -> None:
    positions = torch.tensor([[[4, 0, 3, -1, 2, 1, -1]]])
    keys = rank_keys(torch.tensor([[[4.0, 1.0, 9.0, 9.0, 8.0, 2.0, 9.0]]]), positions, positions >= 0)
    assert best_tokens(keys, positions, 3).tolist() == [[[4, 2, 0]]]
    assert best_tokens(keys, positions, 6)[0, 0, 1:].tolist() == [1, 5, 4, 2, 0], "a pad first, where real ones run out"


@QUICK
@given(data=st.data())
def test_best_within_limits(data: st.DataObject) -> None:
    """Each row and head keeps its own number; what is missing counts as pads, what is beyond is dead."""
    candidates, rows, heads = data.draw(st.integers(1, 7)), 2, 2
    limits = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=4, max_size=4))).view(rows, heads)
    count, shared = int(limits.max()), data.draw(st.booleans())
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    order = torch.rand(rows, heads, candidates, generator=random).argsort(-1)
    order = order[:, :1].expand_as(order) if shared else order
    pads = torch.tensor([[[data.draw(st.integers(0, candidates))]] for _ in range(rows)])
    positions = (order - pads).clamp_min(-1)
    scores = torch.rand(rows, heads, candidates, generator=random)
    keys = rank_keys(scores, positions, positions >= 0)
    indices, held = best_within(keys, positions[:, :1] if shared else positions, limits, count)
    assert indices.shape == held.shape == (rows, heads, count)
    assert indices.min() >= 0
    assert indices.max() < candidates, "an index means a candidate, even where it means nothing"
    for row in range(rows):
        for head in range(heads):
            limit, places = int(limits[row, head]), positions[row, head].tolist()
            real = [at for at in range(candidates) if places[at] >= 0]
            expected_slots = sorted(real, key=keys[row, head].tolist().__getitem__)[-limit:]
            expected_slots.sort(key=places.__getitem__)
            expected = [-1] * (limit - len(expected_slots)) + [places[at] for at in expected_slots]
            assert held[row, head].tolist() == expected + [-1] * (count - limit)
            assert indices[row, head, limit - len(expected_slots) : limit].tolist() == expected_slots


# ---- pads ---------------------------------------------------------------------------------------------------------


def mask(*rows: str) -> Tensor:
    """ "..xx" are two pads and two tokens."""
    return torch.tensor([[token == "x" for token in row] for row in rows])


def shown(mask: Tensor | None) -> list[str] | None:
    return None if mask is None else ["".join("x" if real else "." for real in row) for row in mask.tolist()]


def columns(padding: Padding, start: int, stop: int, batch: int = 2) -> list[str] | None:
    return shown(padding.columns(start, stop, batch, torch.device("cpu")))


def test_what_the_model_tells() -> None:
    padding = Padding()
    observed = mask(".xxx", "xxxx")
    assert padding.observe(observed, 0, 4, 2) is not None
    assert (padding.given, padding.observed, padding.irregular, padding.any_pads) == (None, True, False, True)
    assert columns(padding, 0, 4) == [".xxx", "xxxx"]
    assert columns(padding, 0, 2) == [".x", "xx"]
    assert columns(padding, 0, 6) == [".xxxxx", "xxxxxx"], "what the mask does not reach is real"
    assert columns(padding, 1, 4) is None, "no pad from there on"
    assert padding.observe(None, 4, 5, 2) is None
    assert columns(padding, 0, 4) == [".xxx", "xxxx"], "what is hidden stays hidden"


def test_a_longer_mask_is_cut_and_a_shorter_one_hides_the_rest() -> None:
    padding = Padding()
    assert shown(padding.observe(mask(".xxxxx"), 0, 3, 1)) == [".xx"]
    assert shown(padding.observe(mask("xxx"), 0, 5, 1)) == ["xxx.."]
    assert padding.irregular
    assert columns(padding, 0, 5, 1) == ["xxx.."]


@pytest.mark.parametrize("gap", ["x.x", ".x.x", "xx.", "xxx..x"])
def test_a_gap_is_irregular_for_good(gap: str) -> None:
    padding = Padding()
    padding.observe(mask(gap), 0, len(gap), 1)
    assert padding.irregular
    padding.observe(mask("." + "x" * len(gap)), 0, len(gap) + 1, 1)
    assert padding.irregular
    padding.reset()
    assert padding.irregular is False


def test_a_mask_may_hide_and_not_show() -> None:
    """Hidden at the end of a row, they count for no position; before others, they keep theirs."""
    padding, device = Padding(), torch.device("cpu")
    padding.observe(mask(".xxxxx", "xxxxxx"), 0, 6, 2)
    assert padding.newly_hidden(mask(".xxxxxx", "xxxxxxx"), 6, 2) is None
    hidden = padding.newly_hidden(mask(".x.x..x", "xxxxxxx"), 6, 2)
    assert hidden is not None
    assert columns(padding, 0, 6) == [".xxxxx", "xxxxxx"], "nothing has changed so far"
    padding.hide(hidden)
    assert shown(hidden.positions) == [".x.xx.", "......"]
    assert hidden.pads.tolist() == [3, 0]
    assert columns(padding, 0, 6) == [".x.x..", "xxxxxx"]
    assert shown(padding.counted(0, 7, 2, device)) == [".xxx..x", "xxxxxxx"]
    assert padding.tokens_hidden == 2
    with pytest.raises(ValueError, match=r"shows 1.*0"):
        padding.newly_hidden(mask(".x.xx.", "xxxxxx"), 6, 2)
    padding.crop(5)
    assert padding.tokens_hidden == 1


def test_a_mask_that_was_told_and_given_may_hide_later() -> None:
    for first, later in (("xxx", ["..x"]), ("x.x", None)):
        padding = Padding(mask("xxx"))
        padding.observe(mask(first), 0, 3, 1)
        hidden = padding.newly_hidden(mask("xx.x"), 3, 1)
        assert (None if hidden is None else shown(hidden.columns < 4)) == later


@pytest.mark.parametrize(
    ("told", "known", "irregular"),
    [
        ([(0, "....", "xxxx")], ["....", "xxxx"], False),
        ([(0, ".", "x")], [".", "x"], False),
        ([(0, "xxx", "xxx")], None, False),
        ([(0, "xxx", "xxx"), (3, "xxxx", "xxx.")], ["xxxx", "xxx."], True),
        ([(0, "xxx", "xxx"), (3, "xxxx", "xxx."), (4, "xxxxx", "xxx.x")], ["xxxxx", "xxx.x"], True),
        ([(0, "x..x", "xxxx"), (1, "xx", "xx")], None, True),  # taken back
        *(([(0, "xxx"), (3, f"xxx{turn}")], [f"xxx{turn}"], True) for turn in (".x", "..x", "x.x", ".xxx")),
    ],
    ids=str,
)
def test_what_is_learned(told: list[tuple[Any, ...]], known: list[str] | None, irregular: bool) -> None:
    padding, batch = Padding(), len(told[0]) - 1
    for start, *rows in told:
        padding.observe(mask(*rows), start, len(rows[0]), batch)
    assert columns(padding, 0, len(rows[0]), batch) == known
    assert columns(padding, padding.all_real_from, len(rows[0]), batch) is None
    assert (padding.irregular, padding.any_pads) == (irregular, known is not None)


def test_the_users_mask_wins_for_the_columns_it_covers() -> None:
    padding = Padding(mask("..xx", "xxxx").long())
    assert padding.given is not None
    assert padding.any_pads
    assert columns(padding, 0, 4) == ["..xx", "xxxx"]
    assert shown(padding.observe(mask("xxxxxx", ".xxxxx"), 0, 6, 2)) == ["..xxxx", "xxxxxx"]
    assert shown(padding.observe(None, 0, 5, 2)) == ["..xxx", "xxxxx"]
    assert shown(padding.observe(None, 0, 3, 2)) == ["..x", "xxx"]


def test_the_users_rows_are_repeated() -> None:
    padding = Padding(mask(".x", "xx"))
    assert columns(padding, 0, 2, 4) == [".x", ".x", "xx", "xx"]
    with pytest.raises(ValueError, match=r"2.*divide.*3"):
        columns(padding, 0, 2, 3)
    empty = Padding(torch.ones(0, 2))
    with pytest.raises(ValueError, match="has 0 rows"):
        empty.observe(None, 0, 2, 2)


def test_rows_move_with_the_batch() -> None:
    padding = Padding(mask(".x", "xx"))
    padding.observe(mask("xxx", ".xx", "xx.", "xxx"), 0, 3, 4)
    padding.map_rows(lambda rows: rows.flip(0), 4)
    assert columns(padding, 0, 3, 4) == ["xxx", "xx.", ".xx", ".xx"]
    assert shown(padding.observe(None, 0, 3, 4)) == ["xxx", "xxx", ".xx", ".xx"], "the user's rows as well"
    nothing = Padding()
    nothing.map_rows(lambda rows: rows.flip(0), 4)
    assert columns(nothing, 0, 3, 4) is None


def test_reset_forgets_everything() -> None:
    padding = Padding(mask("x.x"))
    padding.observe(None, 0, 3, 1)
    padding.reset()
    assert (padding.given, padding.observed, padding.irregular, padding.any_pads) == (None, False, False, False)
    assert columns(padding, 0, 3, 1) is None
    assert padding.observe(mask("xxx"), 0, 3, 1) is not None
    assert columns(padding, 0, 3, 1) is None


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "sinks", "protected", "blocks", "smallest"),
    [
        (4, None, 4, 1, 12),
        (4, 0, 0, 0, 8),
        (4, 5, 5, 2, 16),
        (4, 9, 9, 3, 20),
        (1, None, 1, 1, 3),
        (1, 0, 0, 0, 2),
        (16, 16, 16, 1, 48),
        (16, 17, 17, 2, 64),
    ],
)
def test_protection_in_blocks(block: int, sinks: int | None, protected: int, blocks: int, smallest: int) -> None:
    sizes = BlockBudget.validate(smallest, block, sinks)
    assert (sizes.protected, sizes.protected_blocks, sizes.smallest) == (protected, blocks, smallest)
    assert sizes.capacity == smallest
    assert sizes.of(smallest + block) == BlockBudget(smallest + block, block, protected, block)
    if smallest > block:
        with pytest.raises(ValueError, match=rf"budget={smallest - block} .*: {smallest}\."):
            BlockBudget.validate(smallest - block, block, sinks)


def test_every_span_counts_in_the_smallest_budget() -> None:
    """Each of 4 tokens touches at most two blocks of 4, wherever eviction has moved it."""
    spans = [(8, 12), (20, 24), (40, 44)]
    smallest = [BlockBudget.validate("1%", 4, 4, None, spans[:count]).smallest for count in range(4)]
    assert smallest == sorted(set(smallest))


@pytest.mark.parametrize(
    ("recent", "blocks"), [(None, 1), (0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)], ids=lambda value: f"{value}"
)
def test_newest_tokens_in_blocks(recent: int | None, blocks: int) -> None:
    sizes = BlockBudget.validate(40, 4, None, recent)
    assert (sizes.recent, sizes.recent_blocks) == (4 if recent is None else recent, blocks)
    assert sizes.smallest == (1 + blocks + 1) * 4
    assert sizes.of(44).recent == sizes.recent
    assert BlockBudget.validate("10%", 4, None, recent).resolve(10).capacity == sizes.smallest
    message = rf"recent_tokens={sizes.recent}\) take {blocks}, .*\(1 \+ {blocks} \+ 1\) \* 4\. Smallest legal budget: "
    with pytest.raises(ValueError, match=message + rf"{sizes.smallest}\."):
        BlockBudget.validate(4, 4, None, recent)


@pytest.mark.parametrize(("recent", "kind"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("4", TypeError)])
def test_newest_tokens_are_a_whole_number(recent: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="recent_tokens"):
        BlockBudget.validate(40, 4, None, recent)


@pytest.mark.parametrize(
    ("ratio", "prompt", "tokens"),
    [(0.25, 100, 28), (0.25, 96, 24), (1.0, 50, 52), (1.0, 48, 48), (0.01, 100, 12), (0.5, 0, 12), (1, 13, 16)],
)
def test_a_share_of_the_prompt(ratio: float, prompt: int, tokens: int) -> None:
    sizes = BlockBudget.validate(f"{100 * ratio}%", 4, None)
    with pytest.raises(RuntimeError, match=f"{100 * ratio:g}%"):
        _ = sizes.capacity
    resolved = sizes.resolve(prompt)
    assert resolved == BlockBudget(tokens, 4, 4, 4)
    assert resolved.resolve(1000) is resolved


# ---- slots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [1, 2])
def test_slots_are_gathered_by_set(sets: int) -> None:
    states = torch.arange(2 * 2 * 5 * 3.0).view(2, 2, 5, 3)
    slots = torch.tensor([[[4, 0], [1, 1]], [[2, 3], [0, 4]]])[:, :sets]
    gathered = gather_slots(states, slots)
    assert gathered.shape == (2, 2, 2, 3)
    for row in range(2):
        for head in range(2):
            for at in range(2):
                assert torch.equal(gathered[row, head, at], states[row, head, slots[row, head % sets, at]])
    index = slot_index(slots, states)
    assert index.shape == gathered.shape
    assert index.data_ptr() == slots.data_ptr(), "no copy"


def test_storage_is_like_the_states() -> None:
    like = torch.zeros(2, 3, 1, 5, dtype=torch.bfloat16)
    with torch.inference_mode():
        storage = Columns().make((2, 3, 7, 5), like.dtype, like.device)
    assert (storage.shape, storage.dtype, storage.device) == ((2, 3, 7, 5), torch.bfloat16, like.device)
    assert not storage.is_inference(), "it may be written to outside"
    assert byte_count(storage, None, storage) == 2 * 2 * 3 * 7 * 5 * 2
    assert byte_count(None) == 0
    assert Columns().make((2, 3), like.dtype, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("coder", [Plain(), FewBits((Codec(4), Codec(4)), 2, 0)], ids=["plain", "few_bits"])
def test_which_storage_serves_again(coder: Any) -> None:
    states = torch.zeros(2, 3, 4, 6)

    def serves(other: torch.Tensor, slots: int, most: int) -> bool:
        store = Store(coder)
        store.start(states, states, 7, 7)
        before = store.tensors
        store.start(other, other, slots, most)
        return all(one is another for one, another in zip(before, store.tensors, strict=True))

    assert all(serves(states, slots, most) for slots, most in [(7, 7), (1, 7), (7, 9), (0, 100)])
    assert serves(states[:, :, :1], 7, 7), "however many tokens come"
    assert not any(serves(states, slots, most) for slots, most in [(8, 9), (1, 6)])
    others = [states[:1], states[:, :2], states[..., :4], states.half(), states.to("meta")]
    assert not any(serves(other, 7, 7) for other in others)
