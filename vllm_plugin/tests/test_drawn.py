"""A few of the servers that `make fuzz-vllm` draws."""

import pytest

from draw_servers import run


@pytest.mark.parametrize("seed", range(8))
def test_all_answers_are_those_of_a_cache_alone(seed: int) -> None:
    assert run(seed) == []
