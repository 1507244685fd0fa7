"""A few of the servers that `make fuzz-vllm` draws."""

import pytest

from draw_servers import run


@pytest.mark.parametrize("seed", range(8))
def test_all_answers_are_those_of_a_cache_alone(seed: int) -> None:
    assert run(seed) == []


@pytest.mark.parametrize("seed", [100, 104])
def test_servers_with_small_budgets(seed: int) -> None:
    """100: a score half-way between two levels. 104: a request that loses its blocks goes on from its own beginning."""
    assert run(seed, small=True) == []
