"""RULER and the needle in a haystack: format, size, answers, score, for two very different tokenizers."""

import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import TASK_GROUPS, Sample, get_task, make_samples, niah
from hf_paged_eviction_eval.tasks.haystack import split_sentences
from hf_paged_eviction_eval.tasks.sized import Prefix, TooSmallError, largest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
NAMES = (*TASK_GROUPS["ruler"], *TASK_GROUPS["niah"])
SUITE = TASK_GROUPS["suite"]
NEEDLES = [name for name in NAMES if name.startswith("ruler_niah")]
TOKENS = {  # to answer, in the protocols
    **dict.fromkeys(NEEDLES, 128),
    "ruler_vt": 30,
    "ruler_cwe": 120,
    "ruler_fwe": 50,
    "ruler_qa_1": 32,
    "ruler_qa_2": 32,
    "niah": 50,
}
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KEY = r"[a-z]+-[a-z]+"
NUMBER = r"[1-9]\d{6}"


#: The embedded tokenizer: pieces of words, a BOS, a chat template.
WORDS = AutoTokenizer.from_pretrained(embedded.path())


@pytest.fixture(scope="module")
def words() -> Any:
    return WORDS


@cache
def samples_of(name: str) -> list[Sample]:
    """Some of 1,024 tokens, which several tests look at."""
    return make_samples(name, WORDS, 1024, 5)


@pytest.fixture(scope="module")
def letters() -> Any:
    """One token per byte, nothing added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    token_ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return token_ids


def one(name: str, tokenizer: Any, length: int = 1024, index: int = 0, seed: int = 0) -> Sample:
    return get_task(name).make(tokenizer, length, index, seed)


@pytest.mark.parametrize("name", [*SUITE, *NAMES])
def test_a_sample_depends_on_length_index_and_seed_only(name: str, words: Any) -> None:
    samples = samples_of(name)
    assert samples[:2] == make_samples(name, words, 1024, 2) and samples[2] == one(name, words, index=2)
    others = [*samples[:3], one(name, words, seed=6), one(name, words, 1100)]
    assert len({sample.context for sample in others}) == len({sample.id for sample in others}) == 5
    for sample in samples:
        assert sample.task == name and 0 <= float(sample.metadata.get("depth", 0)) <= 1
        if name != "next_line":
            assert all(answer in sample.context and answer not in sample.question for answer in sample.answers)
        assert ids(words, sample.prompt) == ids(words, sample.context) + ids(words, sample.question)


@pytest.mark.parametrize("tokenizer,lengths", [("words", (512, 1024)), ("letters", (2048, 3000))])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_answer_fill_the_length(
    name: str, tokenizer: str, lengths: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    encoder = request.getfixturevalue(tokenizer)
    for length in lengths:
        if name == "ruler_cwe" and (tokenizer, length) == ("words", 512):
            continue  # the protocol's example and ten words six times take more
        for sample in make_samples(name, encoder, length, 2, seed=1):
            room = length - sample.max_new_tokens
            total = len(ids(encoder, sample.prompt, special=True))
            apart = len(ids(encoder, sample.context, special=True)) + len(ids(encoder, sample.question))
            assert max(total, apart) <= room
            # Lines of two uuids are the longest unit, about 80 tokens.
            unit = 200 if name == "ruler_niah_multikey_3" else 0
            assert total + sample.max_new_tokens >= min(0.95 * length, length - unit)
            assert sample.max_new_tokens >= min(TOKENS[name], length // 4)
            assert sample.max_new_tokens >= len(ids(encoder, " " + " ".join(sample.answers)))
            if tokenizer == "words":
                assert sample.max_new_tokens == TOKENS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_length_too_small_is_refused_with_one_that_is_enough(name: str, words: Any, letters: Any) -> None:
    for length in (-1, 40):
        with pytest.raises(ValueError, match=rf"{name}.*{length}") as caught:
            one(name, words, length)
        enough = int(re.findall(r"ask for (\d+) or more", str(caught.value))[0])
        assert len(make_samples(name, words, enough, 3)) == 3
        with pytest.raises(ValueError, match="does not fit"):
            one(name, letters, length)


@pytest.mark.parametrize("name", NAMES)
def test_scores(name: str, words: Any) -> None:
    sample, other, *_ = samples_of(name)
    right = ", ".join(sample.answers)
    for text in (right, f" \x01 {right}.", f"\n\nThe answer:\t{right}\n"):
        assert sample.score(text) == 1.0
    assert sample.score(right.upper()) == sample.score(right.lower()) == 1.0
    assert sample.score("") == sample.score("nothing of the kind") == 0.0
    if name != "niah":  # which asks the same every time
        assert sample.score(", ".join(other.answers)) == 0.0
    if len(sample.answers) > 1:
        assert sample.score(sample.answers[-1]) == pytest.approx(1 / len(sample.answers))


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_look_as_in_the_protocol(name: str, words: Any) -> None:
    kind = "uuid" if name.endswith(("single_3", "multikey_3")) else "number"
    key, value = UUID if name.endswith("multikey_3") else KEY, UUID if kind == "uuid" else NUMBER
    for sample in samples_of(name):
        head, _, body = sample.context.partition("\n")
        needles = re.findall(rf"One of the special magic {kind}s for ({key}) is: ({value})\.", body)
        many = name.endswith(("multivalue", "multiquery"))
        some, are, every, kinds = ("Some", "are", "are all", f"{kind}s") if many else ("A", "is", "is", kind)
        assert head == (
            f"{some} special magic {kinds} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kinds} afterwards."
        )
        match = re.fullmatch(
            rf"What {every} the special magic {kinds} for (.+) mentioned in the provided text\? "
            rf"The special magic {kinds} for \1 mentioned in the provided text {are}",
            sample.question,
        )
        assert match
        keys_asked = re.split(r", and |, ", match[1])
        assert all(re.fullmatch(key, key_asked) for key_asked in keys_asked)
        assert sorted(value for key, value in needles if key in keys_asked) == sorted(sample.answers)
        assert body.endswith("\n") and not body.endswith("\n\n")
        if not name.endswith(("multikey_2", "multikey_3")):
            keys = 4 if name.endswith(("multikey_1", "multiquery")) else 1
            assert len({needle_key for needle_key, _ in needles}) == keys
            assert len(needles) == max(keys, len(sample.answers))
        if len(keys_asked) == 4:
            assert re.fullmatch(rf"{KEY}, {KEY}, {KEY}, and {KEY}", match[1])


def test_haystacks_of_the_needles(words: Any) -> None:
    noise = one("ruler_niah_single_1", words).context.splitlines()[1:]
    assert sum(line.startswith("One of the special magic numbers for ") for line in noise) == 1
    assert {line for line in noise[:-1] if not line.startswith("One")} == {GRASS}
    assert GRASS.startswith(noise[-1]) or noise[-1].startswith("One")
    like = one("ruler_niah_multikey_2", words).context.splitlines()[1:]
    assert all(re.fullmatch(rf"One of the special magic numbers for {KEY} is: {NUMBER}\.", line) for line in like)
    text = one("ruler_niah_single_2", words).context.splitlines()[1:]
    assert len(text) == 1 and not re.search(r"\s\s", text[0])


def test_needles_in_text_stand_between_sentences(words: Any) -> None:
    for sample in samples_of("ruler_niah_multikey_1"):
        body = sample.context.split("\n")[1]
        assert sum(part.startswith("One of the special") for part in split_sentences(body)) == 4


def test_depths_spread(words: Any) -> None:
    samples = make_samples("ruler_niah_single_2", words, 1024, 16)
    depths = [float(sample.metadata["depth"]) for sample in samples]
    assert min(depths) < 0.4 and max(depths) > 0.75


def test_variables_form_one_chain_in_order(words: Any) -> None:
    for sample in samples_of("ruler_vt"):
        example, _, text = sample.context.rpartition("Keep track of")
        first, *rest = re.findall(r"VAR ([A-Z]{5}) = (\d{5} |VAR [A-Z]{5} )", text)
        assert [name for name, _ in (first, *rest)] == [*sample.answers] and len(set(sample.answers)) == 5
        assert [source for _, source in rest] == [f"VAR {name} " for name in sample.answers[:-1]]
        assert f"the value {first[1].strip()}," in sample.question
        noise = re.sub(r"VAR [A-Z]{5} = (VAR [A-Z]{5}|\d{5}) ", "", text).split("\n")[2:-2]
        assert {line.lstrip(" ") for line in noise} == {GRASS}
        names = re.findall(r"VAR ([A-Z]{3}) =", example)
        assert len(names) == 5 and example.endswith(f"names are: {' '.join(names)}\n\n")
        assert example.split("Question")[1].replace(*re.findall(r"\d{5}", example)[:1], "N").startswith(": Which")


@pytest.mark.parametrize("length,often,seldom,shown", [(1024, 6, 1, (3, 1, 20)), (4096, 30, 3, (10, 3, 40))])
def test_common_words_come_up_as_often_as_in_the_protocol(
    length: int, often: int, seldom: int, shown: tuple[int, int, int], words: Any
) -> None:
    sample = one("ruler_cwe", words, length)
    lists = [line for line in sample.context.split("\n") if line.startswith("1. ")]
    for line, (many, few, different) in zip(lists, (shown, (often, seldom, 0)), strict=True):
        entries = re.findall(r"(\d+)\. ([a-z]+)", line)
        assert " ".join(f"{number}. {word}" for number, word in entries) == line
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert sorted(set(counts.values())) == [few, many]
        assert list(counts.values()).count(many) == 10 and len(counts) >= different
    assert {word for word, count in counts.items() if count == often} == set(sample.answers)
    assert not set(re.findall(r"[a-z]+", lists[0])) & set(re.findall(r"[a-z]+", lists[1]))
    solution = re.findall(r"\d+\. ([a-z]+)", sample.context.split("\n")[2])
    assert all(Counter(re.findall(r"[a-z]+", lists[0]))[word] == shown[0] for word in solution) and len(solution) == 10


def test_coded_words_follow_their_law(words: Any) -> None:
    for sample in make_samples("ruler_fwe", words, 2048, 3):
        text = sample.context.split("\n")[1].split(" ")
        ranked = Counter(text).most_common(6)
        assert ranked[0][0] == "..." and [word for word, _ in ranked[1:4]] == [*sample.answers]
        counts = [count for _, count in ranked]
        assert counts[3] > counts[4] and counts[0] == pytest.approx(4 * counts[1], abs=4)
        assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in text)


@pytest.mark.parametrize("name,hops", [("ruler_qa_1", 1), ("ruler_qa_2", 2)])
def test_documents_answer_the_question_once(name: str, hops: int, words: Any) -> None:
    for sample in samples_of(name):
        documents = re.split(r"\n\n(?=Document \d+:\n)", sample.context.rstrip("\n"))[1:]
        assert [int(text.split(":")[0].split()[1]) for text in documents] == list(range(1, len(documents) + 1))
        (holder,) = [text for text in documents if sample.answers[0] in text]
        (subject_asked,) = re.findall(
            r"[A-Z]\w+ [A-Z]\w+|(?<=town of )\w+", sample.question.split("Question: ")[1][3:-8]
        )
        (subject,) = [text for text in documents if subject_asked in text]
        assert (holder == subject) == (hops == 1)
        if hops == 2:
            (town,) = re.findall(r"was born in (\w+)", subject)
            assert f"{town} is a town on the river {sample.answers[0]}." in holder
        assert len(documents) > 5 and sample.question.endswith(" Answer:")


def test_multikey_3_is_the_official_file_but_for_its_numbers(words: Any) -> None:
    path = SHARED / "ruler" / "niah_multikey_3.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    for line in path.read_text("utf-8").splitlines()[:20]:
        record = json.loads(line)
        text, question = record["input"].rsplit("\n", 1)
        count = text.count("\n")
        task = get_task("ruler_niah_multikey_3")
        # As many lines as there, then every character but those of the uuids is the same.
        draft = task.draw(random.Random(0), 4096, 0)
        ours = draft.context(count - 1) + draft.ask + draft.cue
        assert re.sub(UUID, "#", ours) == re.sub(UUID, "#", record["input"])
        assert len(record["outputs"]) == len(draft.answers) == 1
        (uuid,) = set(re.findall(UUID, question))
        assert f"for {uuid} is: {record['outputs'][0]}." in text


def test_the_needle_lies_at_eleven_depths(words: Any) -> None:
    samples = make_samples("niah", words, 1024, 11)
    assert [sample.metadata["depth"] for sample in samples] == [place / 10 for place in range(11)]
    for sample in samples:
        depth = float(sample.metadata["depth"])
        assert sample.context.count(niah.NEEDLE) == 1
        before, after = sample.context.split(niah.NEEDLE)
        assert before == "" or depth == 1 or before.endswith(".")
        assert (before == "") if depth == 0 else (after == "\n") if depth == 1 else before and after
        assert len(before) <= depth * (len(before) + len(after))


def test_the_needle_moves_back_to_the_end_of_a_sentence() -> None:
    text = "One two. Three four. Five."
    assert niah.bury(text, 0.0) == niah.NEEDLE + text
    assert niah.bury(text, 0.2) == niah.NEEDLE + text
    assert niah.bury(text, 0.5) == "One two." + niah.NEEDLE + "Three four. Five."
    assert niah.bury(text, 1.0) == text + niah.NEEDLE
    assert niah.bury("", 0.5) == niah.NEEDLE and niah.bury("no end", 0.9) == niah.NEEDLE + "no end"


@pytest.mark.parametrize("name", ("ruler_niah_single_2", "ruler_cwe"))
def test_long_samples_take_few_looks(name: str, words: Any) -> None:
    seen = 0

    class Counting:
        chat_template = words.chat_template
        apply_chat_template = words.apply_chat_template

        def __call__(self, text: str, **options: Any) -> Any:
            nonlocal seen
            seen += len(text)
            return words(text, **options)

    sample = one(name, Counting(), 8192)
    assert sample == one(name, words, 8192)
    assert seen < 8 * len(sample.prompt)


def test_largest_finds_the_greatest_size_that_fits() -> None:
    for rate in (0.3, 1, 7, 80):
        for budget in (100, 999, 50_000):
            size = largest(lambda count, rate=rate: 20 + int(rate * count), budget, 1)  # type: ignore[misc]
            left = budget - (20 + int(rate * size))
            assert 0 <= left <= max(rate + 1, budget / 1000)
    jumps = largest(lambda count: 10 * (count // 100), 55, 0)
    assert 500 <= jumps < 600
    assert largest(lambda count: count**2, 10_000, 1) in range(95, 101)
    with pytest.raises(TooSmallError) as caught:
        largest(lambda count: 10 + count, 5, 2)
    assert caught.value.missing == 7


def test_a_prefix_draws_only_what_is_asked_for() -> None:
    drawn: list[int] = []
    prefix = Prefix(drawn.append(number) or number for number in range(100))  # type: ignore[func-returns-value]
    assert prefix(3) == [0, 1, 2] and prefix(2) == [0, 1] and prefix(0) == []
    assert drawn == [0, 1, 2] and prefix(5) == [0, 1, 2, 3, 4]
