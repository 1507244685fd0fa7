"""A prompt comes back before its answer, with the log probabilities of its tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from talking import CHUNK, LONGEST, OPTIONS, embedded, expected, prompt, serving, wait_until_free

import driving
from hf_paged_eviction import PagedEvictionCache

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with serving() as server:
        yield server


def rows(ids: list[int]) -> Any:
    """Of each token after the first, what the cache alone says before it."""
    model, _ = embedded.__wrapped__()
    cache = PagedEvictionCache(model.config, **OPTIONS)
    with torch.no_grad():
        chunks = [model(torch.tensor([ids[at : at + CHUNK]]), cache=cache).logits for at in range(0, len(ids), CHUNK)]
    return torch.cat(chunks, dim=1)[0, :-1].float().log_softmax(-1)


def check(choice: Any, ids: list[int], text: str, answer: str) -> None:
    """The prompt, then the answer."""
    assert choice.text == text + answer
    logprobs, count = choice.logprobs, len(ids)
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    wanted = rows(ids)
    own = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs.token_logprobs[1:count] == pytest.approx(own.tolist(), abs=1e-4)
    for top, row in zip(logprobs.top_logprobs[1:count], wanted, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert (
        len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    )
    for name, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        shown = "" if name in embedded()[1].all_special_tokens else name
        assert choice.text[at:].startswith(shown) or choice.text[at:].startswith(shown.lstrip())
    assert logprobs.text_offset[count : count + 1] in ([], [len(text)])


@pytest.mark.parametrize("new", [0, 1, 12])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_prompt_and_answer(served: Any, new: int, stream: bool, as_tokens: bool) -> None:
    text, (_, tokenizer) = prompt(1), embedded()
    ids = tokenizer(text)["input_ids"]
    arguments = {
        "model": "embedded",
        "prompt": ids if as_tokens else text,
        "max_tokens": new,
        "echo": True,
        "logprobs": 2,
    }
    shown = tokenizer.decode(ids, skip_special_tokens=True) if as_tokens else text
    answer = expected(text, new) if new else ""
    if not stream:
        whole = served.client.completions.create(**arguments)
        check(whole.choices[0], ids, shown, answer)
        assert whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), new)
        assert len(whole.choices[0].logprobs.tokens) == len(ids) + new
        return
    parts = [part.choices[0] for part in served.client.completions.create(**arguments, stream=True)]
    first = parts[0]
    assert first.text.startswith(shown)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
        setattr(first.logprobs, name, joined)
    first.text = "".join(part.text for part in parts)
    check(first, ids, shown, answer)
    assert parts[-1].finish_reason == "length"


def test_without_logprobs(served: Any) -> None:
    """Several prompts and answers; a text that stops an answer may stand in its prompt."""
    texts = [prompt(0), prompt(1)]
    got = served.client.completions.create(
        model="embedded", prompt=texts, max_tokens=5, n=2, echo=True, stop=["The harbour"]
    )
    assert [choice.text for choice in got.choices] == [text + expected(text, 5) for text in texts for _ in range(2)]
    assert all(choice.logprobs is None for choice in got.choices)
    assert wait_until_free(served)["pages_in_use"] == 0


def test_a_prompt_as_long_as_can_be(served: Any) -> None:
    got = served.client.completions.create(model="embedded", prompt=[5] * LONGEST, max_tokens=0, echo=True, logprobs=0)
    assert len(got.choices[0].logprobs.tokens) == LONGEST


def test_a_prompt_that_was_read_before(served: Any) -> None:
    """Its log probabilities are those of the first time."""
    arguments = {"model": "embedded", "prompt": prompt(2), "max_tokens": 0, "echo": True, "logprobs": 1}
    logprobs = [served.client.completions.create(**arguments).choices[0].logprobs for _ in range(3)]
    assert logprobs[0] == logprobs[1] == logprobs[2]


def test_a_token_that_ends_the_answer(served: Any) -> None:
    """Who scores texts asks for one token and leaves the last one out."""
    _, tokenizer = embedded()
    (end,) = tokenizer.convert_tokens_to_ids(["<eos>"])
    ids = tokenizer(prompt(1))["input_ids"]
    arguments = {"model": "embedded", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    got = served.client.completions.create(**arguments, logit_bias={str(end): 100}).choices[0]
    assert len(got.logprobs.tokens) == len(ids) + 1
    assert got.finish_reason == "stop"


def test_lm_eval(served: Any) -> None:
    """The harness that scores texts over this route agrees with the cache alone."""
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")
    _, tokenizer = embedded()
    before = tokenizer(prompt(1))["input_ids"]
    after = tokenizer(" under the well", add_special_tokens=False)["input_ids"]
    payload = completions.LocalCompletionsAPI._create_payload
    client = type("Client", (), {"model": "embedded"})()
    body = payload(client, [before + after, before[:20] + after])
    got = served.http.post("/v1/completions", json=body).json()
    parsed = completions.LocalCompletionsAPI.parse_logprobs(got, ctxlens=[len(before), 20])
    for beginning, (logprob, is_greedy) in zip((before, before[:20]), parsed, strict=True):
        log_probabilities = rows(beginning + after)[len(beginning) - 1 :]
        assert logprob == pytest.approx(
            float(log_probabilities.gather(1, torch.tensor(after)[:, None]).sum()), abs=1e-3
        )
        assert is_greedy == (log_probabilities.argmax(-1).tolist() == after)
