"""The tasks of the suite: the same for everyone, of the length asked for, and scored by what is asked."""

import random
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.tasks import MAX_QUESTION_TOKENS, TASK_GROUPS, held_out_texts, make_samples
from hf_paged_eviction_eval.tasks.haystack import sentence
from hf_paged_eviction_eval.tasks.words import CLASSES, POOL, Words

LENGTHS = (256, 2048)
SUITE = TASK_GROUPS["suite"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded.path())


def count(tokenizer: Any, text: str, special: bool = False) -> int:
    return len(tokenizer(text, add_special_tokens=special)["input_ids"])


def test_made_up_sentences_have_the_right_article() -> None:
    rng = random.Random(0)
    text = " ".join(sentence(rng) for _ in range(5000)).lower()
    assert re.search(r"\ban answer\b", text) and not re.search(r"\ba [aeiou]|\ban [^aeiou]", text)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SUITE)
def test_prompt_and_answer_fill_the_length(name: str, length: int, tokenizer: Any) -> None:
    for sample in make_samples(name, tokenizer, length, 2, seed=1):
        total = count(tokenizer, sample.prompt, special=True) + sample.max_new_tokens
        assert 0.95 * length <= total <= length
        assert count(tokenizer, sample.question) <= MAX_QUESTION_TOKENS
        assert count(tokenizer, " " + sample.answers[0]) <= sample.max_new_tokens


@pytest.mark.parametrize("name", SUITE)
def test_right_answers_score_one_and_wrong_ones_less(name: str, tokenizer: Any) -> None:
    sample, other, *_ = make_samples(name, tokenizer, 512, 4)
    right = sample.answers[0]
    for text in (right, f" {right}", f"\n{right}\nand more", f" {right}  "):
        assert sample.score(text) == 1.0
    assert sample.score("") == 0.0
    assert sample.score("nothing of the kind 0") < 0.7
    assert sample.score(other.answers[0]) < 1.0


def test_partial_answers_score_in_between(tokenizer: Any) -> None:
    (span,) = make_samples("span_copy", tokenizer, 512, 1)
    words = span.answers[0].split()
    assert span.score(" ".join(words[:6])) == pytest.approx(0.5)
    assert span.score(" ".join(words[1:])) == 0.0
    (pair,) = make_samples("kv_recall_many", tokenizer, 512, 1)
    assert pair.score(pair.answers[0].split()[0]) == pytest.approx(0.5)


def test_a_chain_may_be_written_out(tokenizer: Any) -> None:
    (sample,) = make_samples("variable_tracking", tokenizer, 512, 1)
    number = sample.answers[0]
    assert sample.score(f" b = a = {number}") == 1.0
    assert sample.score(f" {number} = a = 10") == 0.0


def test_passkeys_lie_at_every_depth(tokenizer: Any) -> None:
    samples = make_samples("passkey", tokenizer, 512, 10)
    assert {int(float(s.metadata["depth"]) * 5) for s in samples} >= {0, 1, 2, 3, 4}


def test_few_shot_queries_are_new_words(tokenizer: Any) -> None:
    for sample in make_samples("few_shot", tokenizer, 512, 8):
        assert sample.question not in sample.context


def test_held_out_modules_fill_no_haystack() -> None:
    assert set(held_out_texts()) == set(library.HELD_OUT)
    assert not set(library.HELD_OUT) & set(library.FILLER)
    assert all(len(text) > 1000 for text in held_out_texts().values())


def test_words_of_different_roles_are_different() -> None:
    assert len(set(POOL)) == len(POOL)
    assert not {word for members in CLASSES.values() for word in members} & set(POOL)
    words = Words(random.Random(0))
    assert not set(words.take(100)) & set(words.take(100))
    with pytest.raises(ValueError, match="left"):
        words.take(len(POOL))
