"""Budgets as typed and as resolved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_eviction_eval.caches.budgets import parse_budget, parse_budgets, rounding_notes
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.cache import CacheOptions

LENGTHS = st.integers(1, 100_000)
BLOCKS = st.integers(1, 128)


@given(st.integers(1, 1_000_000), LENGTHS, BLOCKS)
def test_tokens_are_rounded_up_to_a_legal_budget(tokens: int, length: int, block: int) -> None:
    budget, options = parse_budget(str(tokens)), CacheOptions(block_size=block)
    if tokens <= 2 * block:
        with pytest.raises(UserError, match=f"Smallest legal budget: {3 * block}"):
            budget.resolve(length, options)
        return
    resolved = budget.resolve(length, options)
    assert resolved is not None and resolved % block == 0
    assert tokens <= resolved < tokens + block


@given(st.decimals("0.01", "100", places=2), LENGTHS, BLOCKS)
def test_share_of_the_length(share: object, length: int, block: int) -> None:
    resolved = parse_budget(f"{share}%").resolve(length, CacheOptions(block_size=block))
    assert resolved is not None and resolved % block == 0 and resolved >= 3 * block
    assert resolved * 100 >= float(str(share)) * length * (1 - 1e-12)


@settings(max_examples=30)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        budget = parse_budget(text)
    except UserError as error:
        assert "full" in str(error)
    else:
        few = budget.tokens is not None and budget.tokens <= 32
        assert few or budget.is_full or budget.memory or (budget.resolve(1000, CacheOptions()) or 0) >= 48


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "101%", "1e", "half", "%", "1/0%"])
def test_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_budget(text)


def test_list_keeps_order_and_drops_repetitions() -> None:
    labels = [budget.label for budget in parse_budgets("full, 12.5%,256,full")]
    assert labels == ["full", "12.5%", "256"]
    with pytest.raises(UserError):
        parse_budgets(" , ")


def test_full_cache_has_no_budget() -> None:
    assert parse_budget("FULL").resolve(1000, CacheOptions()) is None


def test_note_only_where_the_smallest_budget_is_used() -> None:
    notes = rounding_notes(parse_budgets("6%,12.5%,full"), 512, CacheOptions())
    assert len(notes) == 1 and notes[0].startswith("6%") and "48" in notes[0]
