"""Every policy that is served gives, for each request of a batch, the tokens of `PagedEvictionCache` alone."""

import random

import pytest

from engines import drawn, served
from hf_paged_eviction import available_policies, make_policy
from hf_paged_eviction.internals import reads_profile
from tiny_models import tiny

LENGTHS = (100, 40, 300, 64, 10)


def _is_served(name: str) -> bool:
    needs = make_policy(name).needs
    return not needs.by_probe and needs.decision_interval == 1


SERVED = [name for name in available_policies() if _is_served(name) and not reads_profile(name)]
OTHERS = {"shared": "separate", "separate": "shared"}
CASES = [(name, make_policy(name).needs.heads) for name in SERVED]
CASES += [
    (name, OTHERS[make_policy(name).needs.heads])
    for name in ("key_norm", "keydiff", "paged_eviction", "h2o", "snapkv", "r_kv")
]


@pytest.mark.parametrize(("policy", "heads"), CASES)
def test_as_alone(policy: str, heads: str) -> None:
    folder, model = tiny("llama")
    rng = random.Random(7)
    prompts = {f"request {count}": drawn(rng, count) for count in LENGTHS}
    with served(folder, model, {"budget": 64, "policy": policy, "heads": heads}, max_num_batched_tokens=128) as server:
        for name, prompt in prompts.items():
            server.add(name, prompt, 40)
        answers = server.finish()
        for name, prompt in prompts.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()
        assert server.record.preempted == 0
