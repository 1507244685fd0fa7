"""Heads of different size: pages of sets, blocks of groups, and answers with a table of shares."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from engines import drawn, served
from hf_paged_eviction.internals import Shares
from hf_paged_eviction_vllm.group import spec_of
from hf_paged_eviction_vllm.heads import fit, pages_of
from hf_paged_eviction_vllm.settings import Settings
from real_model import PROFILE
from tiny_models import tiny

EMBEDDED = Path(__file__).parents[2] / "eval" / "embedded" / "model"


@pytest.mark.parametrize("seed", range(20))
def test_no_two_sets_share_a_page(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits, slots = rng.integers(1, 200, int(rng.integers(1, 16))), int(rng.choice([16, 32]))
    sets, counts = len(limits), -(-limits // slots)
    pages = pages_of(tuple(limits.tolist()), slots)
    blocks = -(-int(counts.sum()) // sets)
    used = [page for row, count in zip(pages, counts, strict=True) for page in row[:count]]
    assert len(set(used)) == len(used)
    assert max(used) < blocks * sets
    for at, row in enumerate(pages):  # the first are its own, so nothing moves while a request grows
        own_first = min(blocks, counts[at])
        assert (row[:own_first] == np.arange(own_first) * sets + at).all()
        assert all(page // sets < place for place, page in enumerate(row[: counts[at]]) if place >= own_first)


def test_shares_that_do_not_fit_are_cut() -> None:
    limits = np.array([300, 10, 40, 40])
    cut = fit(limits, 3, 32)
    assert (-(-cut // 32)).sum() <= 12
    assert (cut[1:] == limits[1:]).all()


@pytest.mark.parametrize("policy", ["keydiff", "h2o", "key_norm"])
@pytest.mark.parametrize("batch", [64, 512])
def test_as_alone(policy: str, batch: int) -> None:
    folder, model = tiny("llama")
    rng, options = random.Random(2), {"budget": 128, "policy": policy, "allocator": "heads:[[1.0, 0.2], [2.0, 0.9]]"}
    prompts = {f"r{count}": drawn(rng, count) for count in (300, 110, 33)}
    with served(folder, model, options, max_num_batched_tokens=batch, max_model_len=512) as server:
        assert len(server.record.managers) == 1
        for name, prompt in prompts.items():
            server.add(name, prompt, 70)
        answers = {name.split("-")[0]: tokens for name, tokens in server.finish().items()}
        for name, prompt in prompts.items():
            server.check(name, prompt, answers[name])
        server.check_blocks()


def test_shares_of_layers() -> None:
    folder, model = tiny("llama")
    prompt = drawn(random.Random(4), 200)
    with served(folder, model, {"budget": 96, "policy": "keydiff", "allocator": "pyramid"}) as server:
        server.add("one", prompt, 40)
        (given,) = server.finish().values()
        server.check("one", prompt, given)
        server.check_blocks()


def test_the_embedded_model_with_its_calibration(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
    model.save_pretrained(tmp_path)  # its tensors have the names that vLLM looks for
    options = {"budget": 64, "policy": "calibrated", "profile": str(EMBEDDED / "calibration.safetensors")}
    prompt = drawn(random.Random(4), 300, 3000)
    with served(tmp_path, model, options, max_num_batched_tokens=128) as server:
        server.add("one", prompt, 40)
        (given,) = server.finish().values()
        server.check("one", prompt, given)


@pytest.mark.parametrize("budget", [256, 1024, 2048])
def test_blocks_are_those_of_the_budget(budget: int) -> None:
    """The shape of SmolLM2-135M, with the profile that comes with the package: its shares depend on the length."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=49152, hidden_size=576, num_hidden_layers=30, rope_theta=100000.0, **heads)
    options = {"budget": budget, "policy": "calibrated", "allocator": "heads", "profile": str(PROFILE)}
    server = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8192, get_total_num_kv_heads=lambda: 3, get_num_layers=lambda _: 30),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        max_in_flight_tokens=512,
    )
    settings = Settings(config, options)
    stock = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
    spec, shares = spec_of(stock, server, settings), Shares(settings.allocator, settings.sizes, 30, 3)
    most = 0
    for length in [*range(budget + 1, budget + 400), *range(budget + 1, 8 * budget, 97)]:
        limits = shares.limits(length, ())
        most = max(most, -(-int((-(-np.array(limits) // 32)).sum()) // 90))
    assert most <= spec.kept() <= budget // 32 + 1
