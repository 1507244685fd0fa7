"""Log probabilities of the tokens of a prompt are those of the request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import driving
from driving import CHUNK, alone, batching, model_of, pool, texts
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

if not driving.UNSERVED:
    from hf_paged_eviction_server.prompt_logits import PromptLogits
    from hf_paged_eviction_server.sampling import Sampler, Sampling

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}
LENGTHS = (5, 33, 70, 1, 48, 16)


def slow(family: str, prompt: list[int], **options: Any) -> torch.Tensor:
    """`[tokens - 1, vocabulary]`, chunk by chunk with the cache alone."""
    model, rows = driving.models.build(family).double(), []
    cache = PagedEvictionCache(model.config, **options)
    for start in range(0, len(prompt), CHUNK):
        ids = torch.tensor([prompt[start : start + CHUNK]])
        with torch.no_grad():
            rows.append(model(ids, **{CACHE_ARGUMENT: cache}).logits[0])
    return torch.cat(rows)[:-1].float().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_as_alone(family: str) -> None:
    """Beside requests that ask for none; the answers are the same, too."""
    prompts = texts(LENGTHS)
    samplers = [Sampler(Sampling(logprobs=2, prompt_logprobs=at != 4)) for at in range(len(prompts))]
    with batching(model_of(family), pool(8), **OPTIONS) as turned, PromptLogits(turned.manager):
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, 6, sampler=samplers[at])
        turned.run()
    for at, prompt in enumerate(prompts):
        assert turned.answers[str(at)] == alone(model_of(family), prompt, 6, **OPTIONS)
        logprobs = samplers[at].read
        assert [read.token for read in logprobs] == (prompt[1:] if at != 4 else [])
        for entry, row in zip(logprobs, slow(family, prompt, **OPTIONS) if logprobs else (), strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = row.topk(2)
            assert dict(entry.top) == pytest.approx(
                dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-4
            )


@pytest.mark.parametrize("keeps", [True, False])
def test_a_model_that_makes_all_logits(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every model takes `logits_to_keep`."""
    model, prompt = driving.models.build("llama").double(), texts([40])[0]
    monkeypatch.setattr(type(model), "_supports_logits_to_keep", lambda model: keeps, raising=False)
    sampler = Sampler(Sampling(logprobs=0, prompt_logprobs=True))
    with batching(model, pool(8), **OPTIONS) as turned, PromptLogits(turned.manager):
        turned.add("0", prompt, 3, sampler=sampler)
        turned.run()
    rows = slow("llama", prompt, **OPTIONS)
    wanted = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
    assert [entry.logprob for entry in sampler.read] == pytest.approx(wanted, abs=1e-4)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_one_chunk_in_a_forward() -> None:
    """So that logits of many prompts do not stand in memory at once."""
    samplers = [Sampler(Sampling(logprobs=0, prompt_logprobs=True)) for _ in range(3)]
    with batching(model_of(), pool(8, tokens=64), **OPTIONS) as turned, PromptLogits(turned.manager):
        for at, sampler in enumerate(samplers):
            turned.add(str(at), texts([16])[0], 9, sampler=sampler)
        turned.add("plain", texts([16])[0], 9)
        lengths = []
        while turned.step():
            lengths.append([len(sampler.read) for sampler in samplers])
    assert lengths[:3] == [[15, 0, 0], [15, 15, 0], [15, 15, 15]]
    assert turned.answers["plain"] == turned.answers["2"]


def test_what_was_read_before_is_read_again() -> None:
    prompt = texts([70])[0]
    with batching(model_of(), pool(8, allow_block_sharing=True), **OPTIONS) as turned, PromptLogits(turned.manager):
        logprobs = []
        for at in range(3):
            sampler = Sampler(Sampling(logprobs=0, prompt_logprobs=at > 0))
            turned.add(str(at), prompt, 3, sampler=sampler)
            turned.run()
            logprobs.append(sampler.read)
        assert turned.stats.shared == 0
        turned.add("again", prompt, 3)
        turned.run()
        assert turned.stats.shared == 64
    assert logprobs[0] == [] and len(logprobs[1]) == 69 and logprobs[1] == logprobs[2]


def test_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left for the next one."""
    model = driving.models.build("llama").double()
    sampler = Sampler(Sampling(logprobs=0, prompt_logprobs=True))
    with batching(model, pool(8), **OPTIONS) as turned, PromptLogits(turned.manager):
        turned.add("0", texts([40])[0], 3, sampler=sampler)
        monkeypatch.setattr(model.model, "forward", lambda *args, **inputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            turned.step()
        assert sampler.read == []
        monkeypatch.undo()
        turned.step()
        assert len(sampler.read) == CHUNK


def test_without_the_logits() -> None:
    """It fails, and does not leave them out."""
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        turned.add("0", texts([40])[0], 3, sampler=Sampler(Sampling(logprobs=0, prompt_logprobs=True)))
        turned.add("1", texts([40])[0], 3)
        turned.run()
    assert "PromptLogits" in turned.answers["0"]
    assert turned.answers["1"] == alone(model_of(), texts([40])[0], 3, **OPTIONS)
