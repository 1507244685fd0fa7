"""All options with all calls, against the slow cache; and cases that were wrong once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawing import draw
from playing import RECURRENT, Call, Case, Game, RefusedError, play
from run import Count, one
from smallest import failure_of, message_of, script, smallest

from hf_paged_eviction.layer import moves
from hf_paged_eviction.layer.forwards import Forwards
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.table import moves as table_moves
from hf_paged_eviction.table.table import BlockTable
from witness import Witness, check_all_told

#: Each failed when it was found.
FOUND = {
    "hidden where crop has left nothing that is held": Case(
        options={"block_size": 1, "sink_tokens": 0, "budget": 4, "bits": 8},
        calls=(("steps", 6, "none"), ("crop", 4), ("hide", "any", 5, True)),
        family="gemma3n",
        rows=3,
        seed=9495,
        pass_mask=False,
    ),
    "a row begins anew with a single token that fills its first block, where pads have to move": Case(
        options={"block_size": 1, "budget": 4, "bits": 4},
        calls=(("feed", 3, "none"), ("hide", "row", 1, False), ("feed", 2, "none")),
        family="llama",
        rows=2,
        seed=920287,
        pass_mask=False,
    ),
    "saved where crop has left nothing that is held": Case(
        options={"block_size": 1, "sink_tokens": 0, "budget": 4},
        calls=(("feed", 3, "any"), ("hide", "end", 2, False), ("crop", 4), ("save",), ("feed", 8, "any")),
        family="llama",
        rows=2,
        seed=901027,
        pass_mask=False,
    ),
    "heads get their shares while a single token waits whose query was compared with equal ones": Case(
        options={"block_size": 3, "budget": 18, "record_past": True, "allocator": "heads", "policy": "observed"},
        calls=(("feed", 21, "any"), ("steps", 3, "none")),
        attention="paged_eviction",
        rows=3,
        seed=325,
    ),
    "a mask that was told, and columns taken back": Case(
        options={"block_size": 4, "budget": 12},
        calls=(("feed", 8, "any"), ("crop", 2), ("steps", 1, "none")),
        seed=61,
        pass_mask=True,
    ),
    "a compiled step in few bits that failed and is repeated": Case(
        options={"block_size": 5, "budget": 30, "bits": (4, 2), "static": True},
        calls=(("feed", 9, "none"), ("fail", 1, "before")),
        seed=1002,
    ),
    "a compiled step that failed, and then several tokens": Case(
        options={"block_size": 4, "budget": 16, "static": True, "policy": "recency"},
        calls=(("feed", 18, "none"), ("fail", 1, "before", 4), ("steps", 3, "none")),
    ),
    "a step that failed where a window has moved on": Case(
        options={"block_size": 4, "budget": 16},
        calls=(("feed", 18, "none"), ("fail", 1, "before"), ("steps", 3, "none")),
        family="gemma3",
    ),
    "a short convolution that has gone on when the first forward failed": Case(
        options={"block_size": 4, "budget": 20}, calls=(("fail", 1, "before", 4), ("steps", 2, "none")), family="lfm2"
    ),
    "a short convolution that has gone on when a step failed": Case(
        options={"block_size": 4, "budget": 20},
        calls=(("steps", 1, "none"), ("fail", 1, "before", 4), ("steps", 2, "none")),
        family="lfm2",
    ),
    "a short convolution from which more is taken back than it recorded": Case(
        options={"block_size": 4, "budget": 24, "record_past": True},
        calls=(("feed", 5, "none"), ("crop", 1), ("crop", 2), ("steps", 1, "none")),
        family="lfm2",
    ),
    "a cache of which everything was taken back, made smaller": Case(
        options={"block_size": 2, "budget": 14, "record_past": True, "allocator": "d2o", "policy": "kvzip"},
        calls=(("feed", 1, "none"), ("crop", 1), ("shrink", 1), ("feed", 9, "none"), ("steps", 4, "none")),
        attention="paged_eviction",
    ),
    "attention that failed in a compiled step": Case(
        options={"block_size": 4, "budget": "50%", "static": True, "policy": "expected_attention"},
        calls=(("steps", 1, "none"), ("fail", 1, "between", 1), ("steps", 2, "none")),
        attention="paged_eviction",
    ),
    "a row of few bits of which nothing but a pad is left": Case(
        options={"block_size": 4, "budget": 28, "bits": (4, 2)},
        calls=(("feed", 6, "left"), ("crop", 5), ("steps", 1, "none"), ("feed", 8, "none")),
        seed=4000164,
    ),
    "all of a row is hidden, then one of the first tokens that came after it": Case(
        options={"block_size": 2, "sink_tokens": 7, "budget": 12, "policy": "random"},
        calls=(
            *(("feed", 4, "left"), ("order", "select"), ("hide", "row", 1, False), ("steps", 9, "none")),
            *(("hide", "row", 5, False), ("hide", "any", 1, False), ("steps", 8, "none")),
        ),
        attention="paged_eviction",
        rows=2,
        seed=5107,
        pass_mask=True,
    ),
    "hidden tokens that stand among the newest ones of few bits, then taken back": Case(
        options={"block_size": 4, "budget": 28, "bits": 3, "record_past": True},
        calls=(("feed", 13, "none"), ("hide", "any", 1, False), ("crop", 4), ("steps", 6, "none")),
        rows=2,
        seed=60055,
    ),
    "newest tokens that make up for hidden ones of another layer": Case(
        options={"block_size": 4, "budget": 16, "policy": "key_norm"},
        calls=(("feed", 14, "none"), ("steps", 5, "none"), ("hide", "end", 1, False), ("hide", "any", 5, False)),
        rows=3,
        seed=777034,
    ),
    "hidden tokens that are taken back, and others in their place": Case(
        options={"block_size": 4, "budget": 36, "heads": "separate", "positions": "cache", "record_past": True},
        calls=(
            *(("feed", 14, "none"), ("hide", "row", 1, False), ("hide", "row", 1, False), ("hide", "any", 5, True)),
            *(("hide", "any", 1, True), ("crop", 3), ("steps", 5, "none")),
        ),
        attention="paged_eviction",
        rows=3,
        seed=60178,
    ),
    "a mask that hides tokens of few bits under autocast": Case(
        options={"block_size": 4, "budget": 16, "bits": (8, 4), "policy": "keydiff"},
        calls=(("feed", 23, "none"), ("hide", "end", 1, False), ("steps", 5, "none")),
        rows=3,
        seed=970006,
        autocast=True,
    ),
    "a row that begins with two equal tokens, whose keys are equal in few digits": Case(
        options={"block_size": 4, "budget": 16, "bits": (4, 2)},
        calls=(("feed", 11, "left"), ("steps", 7, "none")),
        rows=2,
        seed=41950055,
        autocast=True,
    ),
    "a window saved under autocast": Case(
        options={"block_size": 4, "budget": 16},
        calls=(("feed", 9, "none"), ("save",), ("steps", 2, "none")),
        family="gemma3",
        autocast=True,
    ),
    "a static cache with linear states, and a batch of another size": Case(
        options={"block_size": 5, "budget": 80, "static": True},
        calls=(("feed", 1, "none"), ("reset",), ("steps", 1, "none")),
        family="falcon_h1",
        rows=2,
    ),
    "layers that share keys in few bits, and hold other numbers of tokens than the first": Case(
        options={"block_size": 8, "budget": 72, "bits": (8, 4), "allocator": "heads"},
        calls=(("feed", 2, "left"), ("steps", 1, "none")),
        family="gemma3n",
        attention="paged_eviction",
        seed=6317,
    ),
}


#: What may happen while single tokens fill the first block of a row in few bits.
IN_A_FIRST_BLOCK: dict[str, tuple[Call, ...]] = {
    "nothing": (),
    "chunks": (("feed", 3, "none"), ("steps", 1, "none"), ("feed", 2, "none")),
    "a chunk with pads": (("feed", 3, "left"),),
    "a chunk that overflows": (("feed", 30, "left"),),
    "tokens taken back": (("crop", 2),),
    "all tokens taken back": (("crop", 9),),
    "rows reordered": (("order", "reorder"),),
    "rows selected": (("order", "select"),),
    "rows repeated": (("order", "repeat"),),
    "saved": (("save",),),
    "copied": (("copy",),),
    "a smaller budget": (("shrink", 1),),
    "tokens hidden": (("hide", "end", 1, False),),
    "tokens forgotten": (("forget", [(1, 2)], False),),
    "other spans protected": (("protect", [(3, 6)]),),
    "begun anew": (("reset",), ("feed", 1, "none"), ("steps", 2, "none")),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"record_past": True, "heads": "separate"},
        {"static": True, "policy": "value_norm"},
        {"policy": "snapkv(window=4)"},
        {"policy": "keydiff", "allocator": "heads", "heads": "separate"},
    ],
    ids=str,
)
@pytest.mark.parametrize("calls", IN_A_FIRST_BLOCK.values(), ids=IN_A_FIRST_BLOCK)
def test_single_tokens_of_few_bits_from_the_start(calls: tuple[Call, ...], options: dict[str, Any]) -> None:
    static = "static" in options
    case = Case(
        options={"block_size": 4, "budget": 20, "bits": (4, 2), **options},
        calls=(
            ("feed", 1, "none" if static else "any"),
            ("steps", 2, "none" if static else "any"),
            *calls,
            ("steps", 18, "none"),
        ),
        attention="paged_eviction" if "allocator" in options or "window" in options.get("policy", "") else "sdpa",
        rows=3,
        seed=4,
    )
    assert play(case).forwards


@pytest.mark.parametrize("first", range(5000, 5120, 30))
def test_all_options_together(first: int) -> None:
    """The bounded share of `make fuzz`."""
    count = Count()
    failed = [case for case in (one(seed, count) for seed in range(first, first + 30)) if case is not None]
    assert not failed, f"{len(failed)} fail, the first of them:\n{script(failed[0])}\n{message_of(failed[0])}"
    assert count.played >= 18
    assert count.evicted >= 7


def test_whatever_leaves_is_told_once() -> None:
    """Drawn calls with a disposal that writes down what leaves."""
    left = played = 0
    for case in map(draw, range(7000, 7043)):
        if case.options.keys() & {"bits", "static"}:
            continue
        # The disposal has no name to be saved under, and what is hidden or forgotten does not leave by eviction.
        calls = (*(call for call in case.calls if call[0] not in ("save", "hide", "forget")), ("shrink", 1))
        try:
            game = play(replace(case, options={**case.options, "disposal": Witness()}, calls=calls))
        except RefusedError:
            continue
        played += 1
        for index, layer in game.cache.paged_layers:
            left += check_all_told(layer, game.slow.taken_in(index, layer.state.waiting)) if layer.held else 0
    assert played >= 10
    assert left >= 300


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_was_found(case: Case) -> None:
    assert play(case).forwards


ROTATIONS = {
    **dict.fromkeys(("cohere", "glm", "smollm3", "yarn", "gemma3"), "sdpa"),
    "gpt_oss": "eager",
    "qwen3_next": "eager",
}


@pytest.mark.parametrize(("family", "attention"), ROTATIONS.items())
def test_every_kind_of_rotation(family: str, attention: str) -> None:
    """Keys that are turned to the places where they stand."""
    pads = "none" if family in RECURRENT else "left"
    calls = (("feed", 30, pads), ("steps", 9, "none"), ("feed", 5, pads), ("steps", 6, "none"))
    options = {"block_size": 4, "budget": 24, "positions": "cache", "heads": "separate"}
    game = play(Case(options, calls, family, attention, rows=2))
    assert any(layer.shifts.amax() > 0 for _, layer in game.cache.paged_layers)
    # As if keys stayed at the places of the text: distances matter to these models.
    game.slow.options = {**options, "positions": "text"}
    with pytest.raises(AssertionError, match="logits differ"):
        game.steps(3)


def test_a_seed_is_a_case() -> None:
    assert [draw(seed) for seed in range(30)] == [draw(seed) for seed in range(30)]
    assert len({repr(draw(seed)) for seed in range(30)}) == 30


def test_every_choice_is_drawn() -> None:
    """In as many cases as a minute plays."""
    cases = [draw(seed) for seed in range(600)]
    options = Counter(name for case in cases for name in case.options)
    calls = Counter(call[0] for case in cases for call in case.calls)
    assert min(options.values()) >= 15
    assert min(calls.values()) >= 20
    assert sum(case.autocast for case in cases) >= 60
    assert {name for name in vars(Game) if not name.startswith("_")} - {"play"} == calls.keys()


def test_a_refusal_is_no_failure() -> None:
    case = Case(options={"budget": 8, "block_size": 16})
    with pytest.raises(RefusedError, match="block_size=16"):
        play(case)
    assert failure_of(case) is None


def _where_they_are(table: BlockTable, sets: torch.Tensor) -> torch.Tensor:
    return torch.arange(table.held).expand(table.positions.shape).contiguous()


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Forwards, "hide", lambda *args, **kwargs: None),  # the mask is not looked at
        (moves, "_level", lambda gone: None),  # one mask serves layers that differ
        (table_moves, "order_of_text", _where_they_are),  # other slots are empty than the mask says
    ],
    ids=["not looked at", "layers differ", "not moved"],
)
def test_a_mask_of_the_past_that_goes_wrong_is_found(
    owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        options={"block_size": 4, "budget": 16},
        calls=(("feed", 22, "left"), ("steps", 3, "none"), ("hide", "end", 1, False), ("steps", 6, "none")),
        rows=2,
        seed=11,
    )
    assert play(case).cache.stats().evicted_tokens
    monkeypatch.setattr(owner, name, wrong)
    assert failure_of(case) == ("AssertionError", "columns ")


@pytest.mark.parametrize("policy", ["key_norm", "h2o"])
def test_an_error_under_autocast_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token moves logits by more than eight bits do."""
    case = Case(
        options={"block_size": 4, "budget": 16, "policy": policy},
        calls=(("feed", 22, "left"), ("steps", 9, "none")),
        attention="paged_eviction",
        rows=2,
        autocast=True,
    )
    game = play(case)
    assert game.cache.stats().evicted_tokens and game.model.dtype == torch.float32
    right = BlockTable.next_slots
    monkeypatch.setattr(BlockTable, "next_slots", lambda table, count=1: (right(table, count) + 1) % table.capacity)
    assert failure_of(case) is not None
    monkeypatch.setattr(BlockTable, "next_slots", right)
    read = PagedLayer.update
    monkeypatch.setattr(PagedLayer, "update", lambda *args, **more: _first_for_second(*read(*args, **more)))
    assert failure_of(case) == ("AssertionError", "columns ")


def _first_for_second(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = values.clone()
    values[:, :, -1] = values[:, :, -2]
    return keys, values


def test_an_error_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest block may go: of all that was drawn, a budget and a text that is longer remain."""
    case = Case(
        options={"block_size": 4, "budget": 16, "policy": "keydiff", "heads": "separate"},
        calls=(("feed", 9, "left"), ("steps", 18, "any"), ("order", "repeat"), ("steps", 2)),
        family="gemma3",
        attention="paged_eviction",
        rows=2,
    )
    assert play(case).cache.stats().evicted_tokens
    right = BlockTable.next_slots
    monkeypatch.setattr(BlockTable, "next_slots", lambda table, count=1: (right(table, count) + 1) % table.capacity)
    kind = failure_of(case)
    assert kind is not None
    assert kind[0] == "AssertionError"
    less = smallest(case)
    assert failure_of(less) == kind
    assert (less.rows, less.family, less.attention) == (1, "llama", "sdpa")
    assert len(less.calls) <= 2
    assert "play(Case(" in script(less)
