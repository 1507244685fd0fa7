"""ROUGE-L: the rules, and bit by bit the values of a plain table of lengths and of the official package."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from hf_paged_eviction_eval.metrics import score_sample
from hf_paged_eviction_eval.metrics.rouge import rouge_l


def f(precision: float, recall: float) -> float:
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("a b c", "a b c", f(1, 1)),
        ("a b", "a b c d", f(1, 0.5)),
        ("a b c d", "a b", f(0.5, 1)),
        ("b a", "a b", f(0.5, 0.5)),
        ("x", "a", 0),
        # Words are counted once per text.
        ("a a a b", "a b", f(1, 1)),
        ("a a a a", "a b a b", f(1, 0.5)),
        # Case counts, and so does the form of a word, and every sign but the full stop.
        ("A", "a", 0),
        ("runs", "run", 0),
        ("a, b", "a b", f(0.5, 0.5)),
        # Sentences end at full stops: words in another order than in the reference, but in sentences of their own.
        ("b. a", "a b", f(1, 1)),
        ("b! a", "a b", f(0.5, 0.5)),
        ("a.b", "b a", f(1, 1)),
        ("x 3.5", "3.5 y", f(2 / 3, 2 / 3)),
        # Any blanks part words; a sentence of blanks is one empty word.
        ("a\n\n b\t", " a\u3000b", f(1, 1)),
        ("a. ", "a", f(0.5, 1)),
        (" ", " . ", f(1, 1)),
        # The union of the common words over all pairs of sentences.
        ("a b. c d", "d c. b a. x", f(0.5, 0.4)),
        ("a b. b c", "a x b c", f(1, 0.75)),
        # No sentence at all.
        ("", "a", 0),
        ("a", "", 0),
        ("...", "...", 0),
        ("", "", 0),
    ],
)
def test_rules(prediction: str, reference: str, score: float) -> None:
    assert rouge_l(prediction, reference) == score


def test_ties_go_left() -> None:
    """Of "a" and "b", both of them longest, "a b" has "b" in common with "b a": left of the last cell it is met."""
    assert common_words(["a", "b"], ["b", "a"]) == {"b"}
    # So "b" is found twice, and "a" not at all; going up, both would be found.
    assert rouge_l("b a", "a b. x b") == f(1 / 2, 1 / 3)


def common_words(x: list[str], y: list[str]) -> set[str]:
    """The plain way: the whole table, and the way back cell by cell."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x, 1):
        for j, b in enumerate(y, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    common, i, j = set(), len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            common.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common


def table_rouge(prediction: str, reference: str) -> float:
    predicted = [" ".join(part.split()).split(" ") for part in prediction.split(".") if part]
    wanted = [" ".join(part.split()).split(" ") for part in reference.split(".") if part]
    if not predicted or not wanted:
        return 0.0
    union: set[str] = set().union(*(common_words(a, b) for a in wanted for b in predicted))
    return f(len(union) / len(set().union(*predicted)), len(union) / len(set().union(*wanted)))


def pairs(count: int) -> list[tuple[str, str]]:
    """Texts of few words, so that ties are many; half of them changed copies of each other."""
    rng = random.Random(7)
    texts = []
    for _ in range(count):
        words = [f"w{index}" for index in range(rng.choice([1, 2, 3, 6, 30]))] + [".", ". ", "", "\n", "的", "A."]

        def text(words: list[str] = words) -> list[str]:
            return [rng.choice(words) for _ in range(rng.choice([0, 1, 3, 10, 40, 70]))]

        predicted, wanted = text(), text()
        if rng.random() < 0.5:
            wanted = list(predicted)
            for _ in range(rng.randrange(8)):
                wanted.insert(rng.randrange(len(wanted) + 1), rng.choice(words))
                wanted.pop(rng.randrange(len(wanted)))
        texts.append((" ".join(predicted), " ".join(wanted)))
    return texts


def test_same_as_the_plain_table() -> None:
    for prediction, reference in pairs(400):
        assert rouge_l(prediction, reference) == table_rouge(prediction, reference), (prediction, reference)


def test_same_as_the_official_package() -> None:
    rouge = pytest.importorskip("rouge", reason="the package `rouge` is not installed").Rouge()

    def official(prediction: str, reference: str) -> float:
        try:
            return float(rouge.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
        except ValueError:  # no sentence
            return 0.0

    for prediction, reference in pairs(150):
        assert rouge_l(prediction, reference) == official(prediction, reference), (prediction, reference)


def test_long_sentences_are_no_recursion() -> None:
    """The official package goes back recursively, and cannot where a pair of sentences has a thousand words."""
    rng, words = random.Random(1), sys.getrecursionlimit() + 100
    predicted, wanted = ([f"w{rng.randrange(400)}" for _ in range(words)] for _ in range(2))
    assert rouge_l(" ".join(predicted), " ".join(wanted)) == table_rouge(" ".join(predicted), " ".join(wanted))


def test_long_answers_are_compared_word_by_word() -> None:
    """Not pair by pair of words: of these there are 40,000."""
    rng, lines = random.Random(2), 0
    texts = [" ".join(f"w{rng.randrange(300)}" for _ in range(200)) for _ in range(2)]

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    rouge_l(*texts)
    sys.settrace(before)
    assert 200 < lines < 4000


def test_chinese_words() -> None:
    pytest.importorskip("jieba")
    # 他 来到 了 北京 清华大学 / 北京 清华大学
    assert score_sample("rouge_zh", "他来到了北京清华大学", ["北京清华大学"]) == f(2 / 5, 1)
    # "。" ends no sentence: the words are out of order.
    assert score_sample("rouge_zh", "大学。北京", ["北京。大学"]) == f(1 / 3, 1 / 3)
