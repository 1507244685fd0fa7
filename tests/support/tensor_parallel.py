"""What each process of a tensor-parallel run, or one process alone, answers."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache

import models
import modes
from hf_paged_eviction import PagedEvictionCache, make_policy
from policy_kinds import NAMES

STEPS = 6
#: Keys split over the processes; copied to each (its key norm spans all heads); latents (MLA) or keys made of them.
FAMILIES = ("llama", "olmo2", "deepseek_v3")
BUDGET = {"budget": 24, "block_size": 4}
Answer = dict[str, Any]


#: Compare heads, or give them budgets of their own.
MIXING = [
    ("tova", "separate", "uniform"),
    ("tova", "separate", "cake"),
    ("adaptive(key_norm, recency, threshold=0.56)", "separate", "uniform"),
    ("h2o", "separate", "cake"),
    ("keydiff", "separate", "heads:[[0.4, 1.8, 1, 1], [1.2, 0.6, 2, 0.3]]"),
    ("keydiff", "separate", "first_prompt(distance=2)"),
    ("expected_attention", "separate", "uniform"),
    ("compactor(n_sink=2, n_recent=2)", "separate", "uniform"),
]
Case = tuple[str, str, str]


def cases(family: str) -> list[Case]:
    """Policies, heads and allocators to try: all that look at keys and values alone, some that look at attention."""
    if family != "llama":  # each process has all heads
        return [(policy, heads, "uniform") for policy in ("keydiff", "random") for heads in ("shared", "separate")]
    policies = [name for name in NAMES if not make_policy(name).needs.queries] + ["h2o"]
    return [*((policy, "separate", "uniform") for policy in policies), *MIXING]


def save_models(folder: Path) -> None:
    """Tiny models whose heads two processes can share."""
    more = {"num_attention_heads": 8, "num_key_value_heads": 4}
    for family in FAMILIES:
        if family == "deepseek_v3":
            model = models.build(family, first_k_dense_replace=2)  # experts know no double precision
        elif family == "olmo2":
            settings = models.family_config("llama", **more).to_dict()
            del settings["model_type"], settings["architectures"]
            config = models.AutoConfig.for_model(family, **settings)
            model = models.randomise(AutoModelForCausalLM.from_config(config), seed=0)
        else:
            model = models.build(family, **more)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder / family)


def load(path: Path, parallel: bool) -> Any:
    """In double precision, so that sums over processes round to the same scores as sums in one."""
    split: dict[str, Any] = {}
    if parallel:
        split = {"tp_plan": "auto"}
        if hasattr(models.PreTrainedModel, "maybe_distribute_model"):
            from transformers.distributed import DistributedConfig

            split = {"distributed_config": DistributedConfig(tp_plan="auto")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **split).eval()


def answer(model: Any, cache: Any) -> Answer:
    """Tokens of a left-padded batch, and per layer the keys' shape and the positions held."""
    ids, mask = modes.batch("greedy", padded=True)
    tokens = modes.run(model, cache, "greedy", ids, mask, STEPS)
    held = [layer.positions for layer in cache.layers] if isinstance(cache, PagedEvictionCache) else []
    return {"tokens": tokens, "positions": held, "heads": cache.layers[0].keys.shape[1]}


def answers(model: Any, family: str) -> dict[Case, Answer]:
    """What the model says with each policy, and with the full cache."""
    by_case = {("full", "", ""): answer(model, DynamicCache())}
    for policy, heads, allocator in cases(family):
        ours = make_policy(policy).needs.queries or allocator != "uniform"
        model.set_attn_implementation("paged_eviction" if ours else "sdpa")
        cache = PagedEvictionCache(model.config, policy=policy, heads=heads, allocator=allocator, **BUDGET)
        by_case[policy, heads, allocator] = answer(model, cache)
    return by_case


def refusal(model: Any) -> str:
    """Of heads that evict the same tokens where they are in two processes."""
    model.set_attn_implementation("sdpa")
    try:
        answer(model, PagedEvictionCache(model.config, policy="keydiff", heads="shared", **BUDGET))
    except ValueError as error:
        return str(error)
    return ""


def answers_of_rank(rank: int, folder: Path, environment: dict[str, str]) -> tuple[dict[str, dict[Case, Answer]], str]:
    """What one of several processes says of all families, and how it refuses shared heads."""
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    split = {family: load(folder / family, parallel=True) for family in FAMILIES}
    by_family = {family: answers(model, family) for family, model in split.items()}
    refused = refusal(split["llama"])
    dist.destroy_process_group()
    return by_family, refused
