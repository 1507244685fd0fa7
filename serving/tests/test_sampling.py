"""Each request chooses its tokens by what it asked for, whatever its neighbours ask."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import driving
from driving import alone, batching, model_of, pool, texts

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

if not driving.UNSERVED:
    from hf_paged_eviction_serving import Sampler, Sampling

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}


def slow(logits: list[float], sampling: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Chances of each token, with lists."""
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(answer):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    best = sorted(range(len(logits)), key=lambda token: -logits[token])
    candidates = best[: sampling.top_k] if sampling.top_k else best
    weights = {token: math.exp((logits[token] - logits[best[0]]) / sampling.temperature) for token in candidates}
    kept_by_min_p = {token for token in candidates if weights[token] >= sampling.min_p}
    whole, so_far, chances = sum(weights.values()), 0.0, [0.0] * len(logits)
    for token in candidates:
        if so_far < sampling.top_p and token in kept_by_min_p:
            chances[token] = weights[token] / whole
        so_far += weights[token] / whole
    rest = sum(chances)
    return [chance / rest for chance in chances]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 2.0, "min_p": 0.05, "top_p": 0.9, "top_k": 5},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "repetition_penalty": 1.4},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 1.0, "logit_bias": {2: 3.0, 5: -100.0}},
    ],
)
def test_chances(options: dict[str, Any]) -> None:
    """As often as the slow twin says."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 2
    prompt, answer = [1, 1, 3], [2, 2, 6]
    settings = Sampling(**options, seed=0)
    sampler, draws = Sampler(settings), 1000
    counts = torch.zeros(8)
    for _ in range(draws):
        counts[sampler.choose(logits, prompt, answer)] += 1
    wanted = torch.tensor(slow(logits.tolist(), settings, prompt, answer))
    assert not counts[wanted == 0].any()
    # Four standard errors.
    assert ((counts / draws - wanted).abs() <= 4 * (wanted * (1 - wanted) / draws).sqrt() + 1e-9).all()
    greedy = Sampler(Sampling(**options | {"temperature": 0.0}))
    assert int(greedy.choose(logits, prompt, answer)) == int(wanted.argmax())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": 2**64},
        {"min_p": 1.1},
        {"repetition_penalty": 1e-39},
        {"repetition_penalty": math.nan},
        {"presence_penalty": -math.inf},
        {"frequency_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
    ],
)
def test_ranges(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Sampling(**wrong)


@pytest.mark.parametrize("size", [5e-324, 1e-46, 1e-39])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_smaller_than_float32(size: float, scale: float) -> None:
    """Where a number is 0 in float32, the most likely token is chosen."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * scale
    best = int(logits.argmax())
    for options in ({"temperature": size}, {"temperature": 1.0, "top_p": size}, {"temperature": size, "top_p": size}):
        assert int(Sampler(Sampling(**options, top_k=10**30, seed=0)).choose(logits, [1], [2])) == best, options


def test_small_vocabularies() -> None:
    """A prompt may hold tokens for which there are no logits."""
    logits = torch.tensor([0.1, 0.3, 0.2])
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    assert int(sampler.choose(logits, [1, 7], [])) == 2


class Failing(Sampler if not driving.UNSERVED else object):  # type: ignore[misc]
    """Fails at its third token."""

    def choose(self, logits: Any, prompt: Any, answer: Any) -> Any:
        if len(answer) == 2:
            raise RuntimeError("no luck")
        return super().choose(logits, prompt, answer)


@pytest.mark.parametrize("new", [3, 12])
def test_one_that_fails_ends_alone(new: int) -> None:
    """The others give what they give alone, and its pages come back; logits that are no numbers are such a failure."""
    prompts = texts([20, 9, 33, 14])
    broken = model_of().get_input_embeddings().num_embeddings
    samplers = [Sampler(Sampling()), Failing(Sampling()), Sampler(Sampling(logit_bias={broken: 1.0})), None]
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, new, sampler=samplers[at])
        turned.run()
        assert turned.bounded.pages_in_use == 0
        assert turned.free == 8
    assert turned.answers["1"] == "its sampler failed: no luck"
    assert turned.answers["2"].startswith(f"its sampler failed: logit_bias: {broken} is not a token")
    for at in (0, 3):
        assert turned.answers[str(at)] == alone(model_of(), prompts[at], new, **OPTIONS)
    with pytest.raises(ValueError, match="not finite"):
        Sampler(Sampling(temperature=1.0)).choose(torch.tensor([0.0, math.nan]), [], [])


def test_of_a_configuration() -> None:
    drawn = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    assert Sampling.of(drawn) == Sampling(0.6, 0.9, 20, repetition_penalty=1.1, min_p=0.1)
    assert Sampling.of(GenerationConfig(do_sample=True)).temperature == 1
    assert Sampling.of(GenerationConfig(do_sample=False)) == Sampling()


def answers(samplers: list[Any], order: list[int]) -> dict[str, Any]:
    prompts = texts([20, 9, 33, 14])
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        for index in order:
            turned.add(str(index), prompts[index], 12, sampler=samplers[index])
        turned.run()
        return turned.answers


def test_alone_or_not() -> None:
    """The same seed gives the same tokens, in any order and alone; who brought no sampler gets what it gets without."""
    samplings = [Sampling(1.0, seed=1), Sampling(0.5, 0.9, seed=1), None, Sampling(2.0, top_k=5, seed=7)]

    def made() -> list[Any]:
        return [None if settings is None else Sampler(settings) for settings in samplings]

    together = answers(made(), [0, 1, 2, 3])
    shuffled = answers(made(), random.Random(0).sample(range(4), 4))
    single = {str(index): answers(made(), [index])[str(index)] for index in range(4)}
    assert together == shuffled == single
    assert together["2"] == alone(model_of(), texts([20, 9, 33])[2], 12, **OPTIONS)
    assert together["0"] != answers([Sampler(Sampling(1.0, seed=2))], [0])["0"]


def test_several_answers() -> None:
    """Each child draws by itself, with a seed of its own."""
    sampler, prompt = Sampler(Sampling(1.0, seed=3)), texts([20])[0]
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        turned.manager._children = 1
        turned.add("a", prompt, 6, sampler=sampler)
        turned.run()
        turned.add("b", prompt, 6, sampler=Sampler(Sampling(1.0, seed=4)))
        turned.run()
    assert turned.answers["a"] != turned.answers["a__child#0"] == turned.answers["b"]
