"""The task: topics that come back, facts where they belong, one conversation for several questions."""

from __future__ import annotations

import re
from itertools import chain, groupby
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, make_samples

TOPICS = ["kv_recall", "kv_recall_many", "variable_tracking", "passkey"]
SHAPES = {
    "kv_recall": r"The code of \w+ is \w+\.",
    "kv_recall_many": r"Register \w+ = \w+ \w+",
    "variable_tracking": r"let \w+ = \w+",
    "passkey": r"The vault opens with passkey \d+\.",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded.path())


@pytest.mark.parametrize("length", [640, 2048])
def test_every_sample_fills_the_length(length: int, tokenizer: Any) -> None:
    for sample in make_samples("conversation", tokenizer, length, 8, seed=3):
        total = len(tokenizer(sample.prompt)["input_ids"]) + sample.max_new_tokens
        assert 0.95 * length <= total <= length
        assert sample.answers[0] in sample.context
        assert sample.answers[0] not in sample.question


def test_questions_share_a_conversation(tokenizer: Any) -> None:
    samples = make_samples("conversation", tokenizer, 1024, 8)
    assert [sample.metadata["topic"] for sample in samples] == TOPICS * 2
    assert len({sample.context for sample in samples[:4]}) == 1
    assert samples[0].context != samples[4].context
    assert samples == make_samples("conversation", tokenizer, 1024, 8)
    assert get_task("conversation").make(tokenizer, 1024, 5) == samples[5]


def test_turns_are_the_context_and_topics_come_twice(tokenizer: Any) -> None:
    for sample in make_samples("conversation", tokenizer, 2048, 16, seed=1)[::4]:
        system, *turns = re.split(r"(?=\n\n(?:User|Agent):\n)", sample.context)
        assert system + "".join(turns) == sample.context
        assert len(turns) == sample.metadata["turns"]
        topics = [name for turn in turns for name in TOPICS if re.search(rf"^{SHAPES[name]}$", turn, re.MULTILINE)]
        visits = [name for name, _ in groupby(topics)]
        # A topic without a fact in one visit, such as the passkey, is seen once.
        assert all(1 <= visits.count(name) <= 2 for name in TOPICS)
        assert visits.count("kv_recall_many") == 2
        ids = tokenizer(sample.context)["input_ids"]
        parts = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        assert ids == tokenizer(system)["input_ids"] + list(chain(*parts))


def test_each_topic_scores_as_its_own_task(tokenizer: Any) -> None:
    for sample in make_samples("conversation", tokenizer, 1024, 4):
        assert sample.score(f" {sample.answers[0]}") == 1
        assert sample.score("nothing") == 0


def test_too_short_a_length_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="'conversation'"):
        make_samples("conversation", tokenizer, 96, 1)
