"""A session whose next part comes later goes on, whatever came between."""

import random
from collections.abc import Sequence

import pytest
import torch

from alone import cache_of
from engines import Server, drawn, served
from hf_paged_eviction_vllm.group import Group
from tiny_models import tiny

NEW = 6


def _ask(server: Server, tokens: Sequence[int]) -> list[int]:
    """The answer to a part of the session."""
    server.tell("session", tokens, NEW)
    before = len(server.sessions["session"])
    while len(server.sessions["session"]) < before + NEW:
        server.step()
    return server.sessions["session"][before:]


@torch.no_grad()
def _alone(server: Server, parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a cache alone gives. The last token of each answer is not part of the text."""
    cache, answers = cache_of(server.model.config, server.options), []
    for part in parts:
        tokens, answer = list(part), []
        while len(answer) < NEW:
            logits = server.model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0, -1]
            tokens = [int(logits.argmax())]
            answer += tokens
        answers.append(answer)
    return answers


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
@pytest.mark.parametrize("allocator", ["uniform", "heads:[[1.0, 0.3], [2.0, 0.7]]"])
def test_a_session_goes_on(policy: str, allocator: str) -> None:
    (folder, model), rng = tiny("llama"), random.Random(0)
    options = {"budget": 64, "policy": policy, "heads": "separate", "allocator": allocator}
    parts, answers = [drawn(rng, count) for count in (100, 60, 40)], []
    with served(folder, model, options, max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as server:
        for at, part in enumerate(parts):
            answers.append(_ask(server, part))
            for number in range(6):  # more than there are rows of requests
                server.add(f"other{at}{number}", drawn(rng, 40 + 37 * number), 4)
                server.finish()
        assert answers == _alone(server, parts)


def test_states_of_ended_requests_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers know of them is small beside the blocks, and is let go with these."""
    (folder, model), rng, groups, stock = tiny("llama"), random.Random(0), set(), Group._state
    monkeypatch.setattr(Group, "_state", lambda group, row: groups.add(group) or stock(group, row))
    pool = 48 * 32 * 2 * 2 * 64 * 4
    with served(
        folder, model, {"budget": 64, "policy": "keydiff"}, max_num_seqs=2, kv_cache_memory_bytes=pool
    ) as server:
        for number in range(40):
            server.add(f"r{number}", drawn(rng, rng.choice([20, 100])), 36)
            server.finish()
        (group,) = groups
        states = group._parked.values()
        sizes = [
            part.nbytes
            for state in states
            for holder in (state, state.noted)
            if holder is not None
            for part in vars(holder).values()
            if isinstance(part, torch.Tensor)
        ]
        assert 0 < sum(sizes) < pool / 50, (sum(sizes), len(states))
