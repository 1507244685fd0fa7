"""A session whose next part comes later goes on, whatever came between."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from alone import cache_of
from engines import Server, drawn, served
from tiny_models import tiny

NEW = 6


def _ask(server: Server, tokens: Sequence[int]) -> list[int]:
    """The answer to a part of the session."""
    engine, scheduler, given = server.llm.llm_engine, server.scheduler, []
    parameters = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True)
    more: dict[str, Any] = {"supported_tasks": engine.get_supported_tasks(), "resumable": True}
    part = engine.input_processor.process_inputs("session", {"prompt_token_ids": list(tokens)}, parameters, **more)
    part.external_req_id = part.request_id  # the engine has answers for it, which nobody waits for
    stock = scheduler.update_from_output

    def noted(*args: Any) -> Any:
        outputs = stock(*args)
        for of_client in outputs.values():
            given.extend(
                token for one in of_client.outputs if one.request_id == "session" for token in one.new_token_ids
            )
        return outputs

    scheduler.update_from_output = noted
    engine.engine_core.add_request(part)
    while len(given) < NEW:
        engine.step()
    scheduler.update_from_output = stock
    return given


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
