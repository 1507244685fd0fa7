"""No forward touches a block that the scheduler does not hold for its request."""

import random
from typing import Any

import numpy as np
import pytest

from engines import drawn, served
from hf_paged_eviction_vllm.owners import Owners
from hf_paged_eviction_vllm.spec import EvictionManager
from tiny_models import tiny


def test_a_block_that_was_given_to_another_request() -> None:
    owners, table = Owners(10), np.array([3, 4, 5, 6])
    one = owners.begin(table[:0], 0, "one")
    owners.check(one, table, 2, 0, 3)
    owners.check(one, table, 2, 2, 4)
    other = owners.begin(table[:0], 0, "other")
    owners.check(other, np.array([7, 5, 0, 0]), 2, 0, 2)  # the first request is done with block 5
    owners.check(one, table, 2, 3, 4)
    assert owners.is_intact(one)
    owners.check(other, np.array([7, 5, 4, 0]), 2, 2, 3)
    assert not owners.is_intact(one)
    with pytest.raises(RuntimeError, match="block 4 of request one was"):
        owners.check(one, table, 2, 3, 4)


def test_an_entry_without_a_block() -> None:
    owners = Owners(10)
    with pytest.raises(RuntimeError, match="block 0"):
        owners.check(owners.begin(np.array([], dtype=int), 0, "one"), np.array([3, 0]), 2, 0, 2)


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_a_scheduler_that_frees_too_much_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that takes lengths for something else than the workers do."""
    stock = EvictionManager.remove_skipped_blocks

    def frees_one_more(manager: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        claim, kept = manager.claim(request_id), manager.claim(request_id).kept
        claim.kept = 2
        stock(manager, request_id, *args, **kwargs)
        claim.kept = kept

    (folder, model), rng, pool = tiny("llama"), random.Random(0), 16 * 32 * 2 * 2 * 64 * 4  # 16 blocks
    options = {"budget": 96, "policy": policy, "reserve": False}
    with served(folder, model, options, kv_cache_memory_bytes=pool, max_num_batched_tokens=64) as server:
        monkeypatch.setattr(EvictionManager, "remove_skipped_blocks", frees_one_more)
        server.add("one", drawn(rng, 150), 60)
        server.step()
        for number in range(6):
            server.add(f"neighbour{number}", drawn(rng, 60), 60)
        with pytest.raises(RuntimeError, match=r"of request (one|neighbour\d)-\w+ was given to another request"):
            server.finish()
