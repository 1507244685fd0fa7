"""The families that vLLM builds on a CPU; sliding layers stay vLLM's own."""

import random

import pytest

from engines import drawn, served
from tiny_models import FAMILIES, tiny


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("llama")])
def test_as_alone(family: str, policy: str) -> None:
    folder, model = tiny(family)
    rng = random.Random(1)
    prompts = {f"r{count}": drawn(rng, count) for count in (150, 70, 20)}
    with served(folder, model, {"budget": 64, "policy": policy}, max_num_batched_tokens=256) as server:
        for name, prompt in prompts.items():
            server.add(name, prompt, 30)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        for name, prompt in prompts.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()
