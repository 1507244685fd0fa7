"""A pool of pages, and the requests that come to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from ..shapes import dtype_of, shape

#: Small enough for a CPU: what is compared is scheduling, and attention to a pool that is equally full.
SHAPE = shape(4096, 256, 768, 4, 8, 4, 8192, eos_token_id=None)


@dataclass(frozen=True)
class ServingSettings:
    """A pool, a trace, and what is compared.

    Attributes:
        budgets: tokens per request and layer.
        policy, block_size: what evicts, and how many tokens together.
        requests: in the trace.
        per_second: requests that arrive, on average.
        prompts, answers: shortest and longest, in tokens; drawn evenly on a logarithmic scale.
        pages, page_size: of the pool.
        batch_tokens: most tokens of a step.
        chunk: prompts are cut every so many tokens where there is a budget.
        seed: of the trace and of the weights.
        shape: of the model, as `LlamaConfig` takes it.
        device: where it runs; in bfloat16 on any but a CPU.
    """

    budgets: tuple[int, ...] = (256, 128)
    policy: str = "keydiff"
    block_size: int = 16
    requests: int = 48
    per_second: float = 8.0
    prompts: tuple[int, int] = (256, 1536)
    answers: tuple[int, int] = (128, 512)
    pages: int = 64
    page_size: int = 64
    batch_tokens: int = 320
    chunk: int = 256
    seed: int = 0
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))
    device: str = "cpu"


@dataclass(frozen=True)
class Arrival:
    """A request of the trace: when it comes (seconds), what it says, how many tokens it wants."""

    at: float
    prompt: list[int]
    answer: int


def trace(settings: ServingSettings) -> list[Arrival]:
    """Requests that arrive at random, long ones and short ones mixed."""
    draw, at, found = random.Random(settings.seed), 0.0, []
    for _ in range(settings.requests):
        at += draw.expovariate(settings.per_second)
        prompt = [draw.randrange(settings.shape["vocab_size"]) for _ in range(between(draw, settings.prompts))]
        found.append(Arrival(at, prompt, between(draw, settings.answers)))
    return found


def between(draw: random.Random, ends: tuple[int, int]) -> int:
    """A number from `ends`, evenly on a logarithmic scale."""
    low, high = ends
    power: float = (high / low) ** draw.random()
    return round(low * power)


def make_model(settings: ServingSettings) -> Any:
    """A model with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(**settings.shape), dtype=dtype_of("auto", settings.device)
        ).eval()
