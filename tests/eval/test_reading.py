"""Divergence of one reading: none where nothing is lost, and what a slow way to compute it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.recommend.passages import Passage
from hf_paged_eviction_eval.recommend.reading import Reader
from hf_paged_eviction_eval.tasks import make_samples

MODEL, TOKENIZER = embedded.load()
SAMPLE = make_samples("kv_recall", TOKENIZER, length=160, count=1, seed=3)[0]
CONTEXT = tuple(TOKENIZER(SAMPLE.context)["input_ids"])
QUESTION = tuple(TOKENIZER(SAMPLE.question, add_special_tokens=False)["input_ids"])
ENDS = frozenset({TOKENIZER.eos_token_id})
PASSAGES = {
    "text": Passage("text", CONTEXT[:-9], (), CONTEXT[-9:], 9),
    "question": Passage("question", CONTEXT, QUESTION, (), 6),
}


def reader(passage: Passage, chunk: int = 32, places: int = 10**6) -> Reader:
    return Reader(MODEL, [passage], chunk, places, ENDS)


@pytest.mark.parametrize("name", PASSAGES)
def test_nothing_lost_is_no_divergence(name: str) -> None:
    reading = reader(PASSAGES[name])
    reference, [measured], full = reading.reference()
    [found] = reading.measure(PagedEvictionCache(MODEL.config, budget=512), reference)
    assert max(found.reading, found.answering) < 1e-6
    fed = len(PASSAGES[name].prompt) + len(reference.answers[0]) - 1
    assert full.get_seq_length() == measured.tokens == found.tokens == fed
    assert reference.answering.shape[:2] == (1, len(reference.answers[0]))


@pytest.mark.parametrize("name", PASSAGES)
@torch.inference_mode()
def test_divergence_is_that_of_logits_side_by_side(name: str) -> None:
    passage, chunk = PASSAGES[name], 32
    reading = reader(passage, chunk)
    reference, _, _ = reading.reference()
    [found] = reading.measure(PagedEvictionCache(MODEL.config, budget=48, policy="keydiff"), reference)
    ids = torch.tensor([passage.prompt + reference.answers[0]])
    ours, theirs = (logits(ids, passage, chunk, cache) for cache in caches())
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none")
    kl, end = kl.sum(-1), len(passage.prompt)
    assert kl[: end - 1].mean() > 1e-5 and kl[end - 1 : -1].mean() > 1e-6, "the budget takes something away"
    assert found.reading == pytest.approx(float(kl[: end - 1].mean()), rel=1e-3, abs=1e-6)
    assert found.answering == pytest.approx(float(kl[end - 1 : -1].mean()), rel=1e-3, abs=1e-6)
    few = reader(passage, chunk, places=5)
    places = few.places.tolist()
    assert places[0] == 0 and places[-1] == end - 2 and len(places) == 5
    [sparse] = few.measure(PagedEvictionCache(MODEL.config, budget=48, policy="keydiff"), few.reference()[0])
    assert sparse.reading == pytest.approx(float(kl[places].mean()), rel=1e-3, abs=1e-6)
    assert sparse.answering == found.answering


def caches() -> list[Any]:
    return [PagedEvictionCache(MODEL.config, budget=48, policy="keydiff"), DynamicCache(config=MODEL.config)]


def logits(ids: torch.Tensor, passage: Passage, chunk: int, cache: Any) -> torch.Tensor:
    """As `generate` would feed them: contexts in chunks, the question, then single tokens."""
    middle, end = len(passage.context), len(passage.prompt)
    edges = [*range(0, middle, chunk), *range(middle, end, chunk), *range(end, ids.shape[1] + 1)]
    parts = [
        MODEL(ids[:, start:stop], **{CACHE_ARGUMENT: cache}, use_cache=True).logits[0]
        for start, stop in pairwise(edges)
    ]
    return torch.cat(parts)


def test_the_full_cache_says_the_answer_where_none_is_given() -> None:
    reference, _, _ = reader(PASSAGES["question"]).reference()
    prompt = torch.tensor([PASSAGES["question"].prompt])
    said = MODEL.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    assert reference.answers == (tuple(said.tolist()),)
    assert SAMPLE.answers[0] in TOKENIZER.decode(reference.answers[0])


def test_passages_read_together_are_as_alone() -> None:
    passages = [Passage(str(at), CONTEXT[at : at + 80], (), CONTEXT[at + 80 : at + 88], 8) for at in (0, 15, 30)]

    def measure(some: list[Passage]) -> list[tuple[float, float]]:
        reading = Reader(MODEL, some, 32, 40)
        cache = PagedEvictionCache(MODEL.config, budget=48, policy="keydiff")
        return [(each.reading, each.answering) for each in reading.measure(cache, reading.reference()[0])]

    together, alone = measure(passages), [measure([each])[0] for each in passages]
    assert together == [pytest.approx(each, rel=1e-3) for each in alone]
    assert len({round(reading, 6) for reading, _ in alone}) == 3
