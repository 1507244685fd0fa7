"""Drawn schedules: arrivals, lengths, budgets and spans of requests, cancels and preemptions."""

import random

import pytest
from vllm.exceptions import VLLMValidationError

from alone import cache_of
from engines import drawn, served
from tiny_models import tiny

POLICIES = ["keydiff", "snapkv", "paged_eviction", "h2o"]
SHARES = "heads:[[1.0, 0.3], [2.0, 0.7]]"


def _options(rng: random.Random) -> dict[str, object]:
    options: dict[str, object] = {
        "budget": rng.choice([64, 96, 128]),
        "block_size": rng.choice([4, 16]),
        "policy": rng.choice(POLICIES),
        "heads": rng.choice(["shared", "separate"]),
        "sink_tokens": rng.choice([0, 4, 16]),
        "recent_tokens": rng.choice([0, 16]),
    }
    if rng.random() < 0.4:
        options |= {"allocator": SHARES, "heads": "separate"}
    return options


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    options, (folder, model) = _options(rng), tiny("llama")
    requests, cancelled, answers = {}, set(), {}
    with served(folder, model, options, max_num_batched_tokens=rng.choice([64, 128, 512])) as server:
        for number in range(8):
            extra, own = {}, {}
            if "allocator" not in options and rng.random() < 0.4:
                own["protect"] = [(rng.randrange(0, 40), rng.randrange(40, 48))]
                extra["paged_eviction_protect"] = [list(span) for span in own["protect"]]
                own["budget"] = extra["paged_eviction_budget"] = options["budget"]
            prompt, new = drawn(rng, rng.choice([5, 30, 64, 100, 250])), rng.choice([1, 20, 60])
            try:
                server.add(f"r{number}", prompt, new, extra)
                requests[f"r{number}"] = prompt, own
            except VLLMValidationError:  # spans that leave no block to evict
                with pytest.raises(ValueError, match="Smallest legal budget"):
                    cache_of(model.config, options | own)
            for _ in range(rng.randrange(0, 12)):
                answers |= {name.split("-")[0]: tokens for name, tokens in server.step().items()}
            if rng.random() < 0.2:
                name = f"r{rng.randrange(0, number + 1)}"
                server.cancel(name)
                cancelled.add(name)
        answers |= {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        for name, (prompt, own) in requests.items():
            if name in answers:
                server.check(name, prompt, answers[name], own)
        assert answers.keys() <= requests.keys() <= answers.keys() | cancelled
        server.check_blocks()
        assert server.record.preempted == 0


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_preempted_requests_are_read_again(policy: str) -> None:
    """Without reserved blocks, and with fewer than all budgets need."""
    rng, (folder, model) = random.Random(3), tiny("llama")
    requests = {f"r{number}": drawn(rng, 40 + 9 * number) for number in range(6)}
    options = {"budget": 128, "policy": policy, "reserve": False}
    pool = 16 * 32 * 2 * 2 * 64 * 4  # 16 blocks of 32 tokens, 2 layers, 2 heads, keys and values
    with served(folder, model, options, kv_cache_memory_bytes=pool, max_num_batched_tokens=64) as server:
        for name, prompt in requests.items():
            server.add(name, prompt, 120)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        assert server.record.preempted > 0
        for name, prompt in requests.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()


def test_reserved_blocks_keep_requests_from_being_preempted() -> None:
    rng, (folder, model) = random.Random(3), tiny("llama")
    requests = {f"r{number}": drawn(rng, 40 + 9 * number) for number in range(6)}
    pool = 16 * 32 * 2 * 2 * 64 * 4
    options = {"budget": 128, "policy": "keydiff"}
    with served(folder, model, options, kv_cache_memory_bytes=pool, max_num_batched_tokens=64) as server:
        for name, prompt in requests.items():
            server.add(name, prompt, 120)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        assert server.record.preempted == 0
        for name, prompt in requests.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()


def test_a_request_has_a_smaller_budget_and_fewer_blocks() -> None:
    rng, (folder, model) = random.Random(5), tiny("llama")
    with served(folder, model, {"budget": 256, "policy": "keydiff"}, max_num_batched_tokens=512) as server:
        prompt = drawn(rng, 300)
        server.add("small", prompt, 40, {"paged_eviction_budget": 64})
        server.add("large", prompt, 40)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        server.check("small", prompt, answers["small"], {"budget": 64})
        server.check("large", prompt, answers["large"])
        server.check_blocks()


def test_a_long_context_in_a_small_pool() -> None:
    """A model of 32,768 tokens with a pool of 4,064 reads 16,000 of them: in 48 blocks, and answers in 33."""
    (folder, model), rng = tiny("llama_of_32k"), random.Random(0)
    pool = 128 * 32 * 2 * 2 * 64 * 4  # one block is nobody's
    options = {"budget": 1024, "policy": "keydiff"}
    engine = {"max_model_len": 32768, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": pool}
    with served(folder, model, options, **engine) as server:
        manager, prompt = server.record.managers[0], drawn(rng, 16_000)
        blocks = manager.block_pool
        assert blocks.num_gpu_blocks * 32 == 4064 + 32
        server.add("one", prompt, 40)
        held, answers = [], {}
        while server.llm.llm_engine.has_unfinished_requests():
            answers |= server.step()
            held.append(blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks())
        assert (max(held), held[-2]) == (48, 33)
        (given,) = answers.values()
        server.check("one", prompt, given)


@pytest.mark.parametrize(
    "extra",
    [{"paged_eviction_bugdet": 64}, {"paged_eviction_budget": "all"}, {"paged_eviction_protect": [1, 2, 3]}],
)
def test_options_that_are_not_valid_end_their_request_alone(extra: dict[str, object]) -> None:
    from hf_paged_eviction_vllm.processor import RequestOptionsProcessor

    class Parameters:
        extra_args = extra

    with pytest.raises(ValueError, match="paged_eviction_"):
        RequestOptionsProcessor.validate_params(Parameters)
