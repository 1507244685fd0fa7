"""Every rule of the official scores, by cases that a broken rule gets wrong."""

import os
import random
import subprocess
import sys
import unicodedata
from typing import Any

import pytest

from hf_paged_eviction_eval.metrics import METRICS, chinese, first_line_of, score_sample


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "score"),
    [
        # Lower case, then ASCII punctuation, then articles.
        ("qa_f1", "PARIS", "paris", 1),
        ("qa_f1", "The. Louvre, (an) a!", "louvre", 1),
        ("qa_f1", "a-n U.S.", "us", 1),
        ("qa_f1", "theatre", "atre", 0),
        ("qa_f1", "x—the—y", "x— —y", 1),  # a blank takes the place of an article
        ("qa_f1", "“Paris”", "Paris", 0),  # typographic quotes stay
        ("qa_f1", "Paris — Texas", "Paris Texas", 0.8),  # and dashes
        ("qa_f1", "Paris\u3000 Texas\n", "Paris Texas", 1),
        # Repeated words count as often as both texts have them.
        ("qa_f1", "no no no yes", "no no", 2 / 3),
        ("qa_f1", "", "", 0),
        ("qa_f1", "the", "a", 0),
        ("qa_f1", "x", "the x y z", 0.5),
        ("count", "3 of 10", "3", 0.5),
        ("count", "There are 12.", "12", 1),
        ("count", "3, 3 and 4", "3", 2 / 3),
        ("count", "three", "3", 0),
        ("count", "03", "3", 0),
        ("count", "13", "3", 0),
        ("retrieval", "Paragraph 7", "Paragraph 7", 1),
        ("retrieval", "7", "Paragraph 7", 1),
        ("retrieval", "Paragraph 7 of 30", "Paragraph 7", 0.5),
        ("retrieval", "Paragraph seven", "Paragraph 7", 0),
        ("retrieval_zh", "段落7", "段落7", 1),
        ("retrieval_zh", "段落7和17", "段落7", 0.5),
        # The first line without marks of Markdown or comments; line feeds before it do not count.
        ("code_sim", "\n\nx = 1", "x = 1", 1),
        ("code_sim", "x = 1\ny = 2", "x = 1", 1),
        ("code_sim", "```python\n# set x\n// set x\ny  # no\nx = 1", "x = 1", 1),
        ("code_sim", " \nx = 1", "x = 1", 0.33),  # a line of blanks is a line
        ("code_sim", "    x = 1", "x = 1", 0.71),  # indentation counts
        ("code_sim", "# nothing", "", 1),
        ("code_sim", "", "x", 0),
        ("code_sim", "x", "", 0),
        ("code_sim", "abcd", "bcde", 0.75),
        # difflib starts no match at letters that are frequent in a long line.
        ("code_sim", "x" + "ab" * 150, "ab" * 150, 0),
        ("code_sim", "ab" * 150, "ab" * 150, 1),
        ("multiple_choice", "The correct answer is (B).", "B", 1),
        ("multiple_choice", "The correct answer is **B**", "B", 1),
        ("multiple_choice", "The correct answer is A, no: The correct answer is (B)", "B", 1),  # brackets first
        ("multiple_choice", "The correct answer is (A). The correct answer is (B)", "B", 0),
        ("multiple_choice", "the correct answer is (B)", "B", 0),
        ("multiple_choice", "B", "B", 0),
        ("multiple_choice", "The correct answer is (E)", "E", 0),
    ],
)
def test_one_answer(metric: str, prediction: str, answer: str, score: float) -> None:
    assert score_sample(metric, prediction, [answer]) == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("Sport", 1), ("It is Sport.", 1), ("sport", 0), ("Sport or Food", 0.5), ("Food", 0), ("", 0)],
)
def test_classification(prediction: str, score: float) -> None:
    assert score_sample("classification", prediction, ["Sport"], ["Food", "Sport", "Color"]) == score


def test_classes_within_the_right_one_do_not_count() -> None:
    classes = ["Color", "sport", "Team sport"]
    assert score_sample("classification", "Team sport", ["Team sport"], classes) == 1
    assert score_sample("classification", "Team sport", ["sport"], classes) == 0.5


def test_nested_classes_are_passed_over_as_officially() -> None:
    """A, AB and ABC are part of ABCD, but taking A out of the list passes over AB."""
    classes = ["A", "AB", "ABC", "ABCD"]
    assert score_sample("classification", "ABCD", ["ABCD"], classes) == 0.5
    assert score_sample("classification", "ABCD", ["ABCD"], [classes[3], *classes[:3]]) == 0.5


@pytest.mark.parametrize("metric", sorted({*METRICS} - {"string_match_all", "classification"}))
def test_best_answer_counts(metric: str) -> None:
    if metric.endswith("_zh"):
        pytest.importorskip("jieba")
    right = {"retrieval": "Paragraph 7", "retrieval_zh": "段落7", "multiple_choice": "B"}.get(metric, "7")
    wrong = {"retrieval": "Paragraph 8", "retrieval_zh": "段落8", "multiple_choice": "A"}.get(metric, "8")
    answer = "The correct answer is (B)" if metric == "multiple_choice" else "7"
    best = score_sample(metric, answer, [right])
    assert best > 0.99
    assert score_sample(metric, answer, [wrong, right]) == score_sample(metric, answer, [right, wrong]) == best
    assert score_sample(metric, answer, (wrong,)) == 0


def test_ruler_counts_the_strings_found() -> None:
    assert score_sample("string_match_all", "ALPHA and\x00beta", ["alpha", "Beta", "gamma", "\nbeta"]) == 0.75
    assert score_sample("string_match_part", "alpha", ["x", "Alpha"]) == 1
    assert score_sample("string_match_part", "alph", ["x", "alpha"]) == 0
    assert score_sample("string_match_part", "\x01alpha\x1f", ["\nalpha", "alpha\n"]) == 0, (
        "stripped after the replacement"
    )
    assert score_sample("string_match_part", "\x7falpha", ["\x7falpha"]) == 1, "only up to 0x1f"


def test_whole_prediction_is_scored() -> None:
    assert score_sample("qa_f1", "Paris\nQuestion: x y", ["Paris"]) == pytest.approx(0.4)
    assert score_sample("qa_f1", first_line_of("Paris\nQuestion: x y"), ["Paris"]) == 1


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("\n\na\nb", "a"),
        ("a", "a"),
        ("", ""),
        ("\n", ""),
        (" \na", " "),
        ("\r\na", "\r"),
        ("a\r\nb", "a\r"),
        ("a\x0bb\nc", "a\x0bb"),
    ],
)
def test_first_line(prediction: str, line: str) -> None:
    assert first_line_of(prediction) == line


def test_chinese_f1() -> None:
    pytest.importorskip("jieba")
    # Blanks, case and punctuation of both scripts do not count.
    assert score_sample("qa_f1_zh", "「ABC》，北京。", ["abc 北京."]) == 1  # noqa: RUF001
    assert score_sample("qa_f1_zh", "。！", ["，"]) == 0  # noqa: RUF001
    assert 0 < score_sample("qa_f1_zh", "他来到了北京清华大学", ["清华大学"]) < 1
    for sign in "《〈〉·":
        assert score_sample("qa_f1_zh", f"{sign}北京", ["北京"]) == pytest.approx(2 / 3), "officially, not punctuation"


def test_chinese_words_are_cut_before_they_are_cleaned() -> None:
    pytest.importorskip("jieba")
    assert chinese.cut("他来到了北京清华大学") == ["他", "来到", "了", "北京", "清华大学"]
    # Without its comma this would be cut as one word.
    assert score_sample("qa_f1_zh", "清，华大学", ["清华大学"]) == 0  # noqa: RUF001


def test_words_added_to_jieba_change_nothing() -> None:
    jieba = pytest.importorskip("jieba")
    chinese._tokenizer.cache_clear()
    try:
        jieba.add_word("来到了北京")
        assert "来到了北京" not in chinese.cut("他来到了北京清华大学")
    finally:
        jieba.del_word("来到了北京")


def test_jieba_is_silent() -> None:
    pytest.importorskip("jieba")
    code = "from hf_paged_eviction_eval.metrics import chinese; print(len(chinese.cut('北京大学')))"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "f1"}, r"metric 'f1'.*qa_f1"),
        ({"answers": []}, r"answers is \[\]"),
        ({"answers": "Paris"}, "'Paris'"),
        ({"metric": "classification"}, "needs all_classes"),
        ({"metric": "classification", "all_classes": "abc"}, "needs all_classes"),
        ({"metric": "retrieval"}, "names no paragraph"),
        ({"metric": "retrieval_zh", "answers": ["Paragraph 3"]}, "段落7"),
    ],
)
def test_wrong_input(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"metric": "qa_f1", "prediction": "x", "answers": ["x"]} | change
    with pytest.raises(ValueError, match=message):
        score_sample(**arguments)


def test_any_text_has_a_score() -> None:
    """Odd characters, half surrogates among them, in every metric."""
    rng = random.Random(0)
    alphabet = [*". \n\x00\ud800\u2028٣9a`#İ🙂", "The", "段落", "北京", "Paragraph "]
    alphabet += [chr(code) for code in range(0x3000, 0x3020) if unicodedata.category(chr(code)) != "Cn"]
    for metric in METRICS:
        if metric.endswith("_zh") and not _has_jieba():
            continue
        for _ in range(30):
            prediction = "".join(rng.choices(alphabet, k=rng.randrange(30)))
            fitting = {"retrieval": "Paragraph 9", "retrieval_zh": "段落9"}
            answers = [fitting.get(metric) or "".join(rng.choices(alphabet, k=9))]
            score = score_sample(metric, prediction, answers, ["a", "北京"])
            assert type(score) is float
            assert 0 <= score <= 1


def _has_jieba() -> bool:
    try:
        import jieba  # noqa: F401
    except ImportError:
        return False
    return True
