"""Metrics of LooGLE (Li et al. 2023, arXiv 2311.04939), as its `automatic_metrics.py` gives them.

Differences: a prediction on which the official script stops with an exception (nothing but full stops; a mask whose
value is no text) scores 0 here, and a prediction is read as a Python literal; the official script runs it as code.
METEOR is official but for the order of words, see `meteor`.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from .extra import import_extra
from .json_answer import json_answer
from .rouge import rouge_l_recall, rouge_n_recall

#: What `bert_score` takes for English.
_ENGLISH_MODEL = "roberta-large"


def rouge_1_recall(prediction: str, answer: str) -> float:
    """Recall of ROUGE-1 by the rules of the package `rouge`. No prediction counts as the word None, here and below."""
    return rouge_n_recall(prediction or "None", answer, 1)


def rouge_2_recall(prediction: str, answer: str) -> float:
    """Recall of ROUGE-2 by the rules of the package `rouge`."""
    return rouge_n_recall(prediction or "None", answer, 2)


def rouge_l_recall_or_none(prediction: str, answer: str) -> float:
    """Recall of ROUGE-L by the rules of the package `rouge`."""
    return rouge_l_recall(prediction or "None", answer)


def bleu_1(prediction: str, answer: str) -> float:
    """BLEU (Papineni et al. 2002) of single words by NLTK, without smoothing.

    Raises:
        UserError: the package is not installed.
    """
    return _bleu(prediction, answer, (1, 0, 0, 0))


def bleu_4(prediction: str, answer: str) -> float:
    """BLEU of runs of four words alone (not of one to four, as elsewhere) by NLTK, without smoothing.

    Raises:
        UserError: the package is not installed.
    """
    return _bleu(prediction, answer, (0, 0, 0, 1))


def _bleu(prediction: str, answer: str, weights: tuple[int, ...]) -> float:
    library = import_extra("nltk.translate.bleu_score", "metrics", "scores by BLEU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of every text without a common run of words
        found = library.sentence_bleu([answer.split()], (prediction or "None").split(), weights=weights)
    return float(found)


def meteor(prediction: str, answer: str) -> float:
    """METEOR (Lavie and Agarwal 2007) by NLTK, over the distinct words of both texts, with synonyms of WordNet.

    The official script puts words into sets, whose order changes from run to run, and its number with it. Here words
    keep the order in which they first stand, which is one of the orders that the official script may draw.

    Raises:
        UserError: the package or WordNet is not installed.
    """
    library = import_extra("nltk.translate.meteor_score", "metrics", "scores by METEOR")
    wanted, said = (list(dict.fromkeys(text.split())) for text in (answer, prediction or "None"))
    try:
        return float(library.single_meteor_score(wanted, said))
    except (LookupError, OSError) as error:  # not there, or not whole
        raise UserError(
            "scores by METEOR need WordNet, which is not among NLTK's data: python -m nltk.downloader wordnet, or "
            "bring corpora/wordnet from another machine and name its folder in NLTK_DATA"
        ) from error


def bert_score(prediction: str, answer: str) -> float:
    """BERTScore (Zhang et al. 2020, arXiv 1904.09675) by the package `bert_score` and the model roberta-large.

    It is the share of the prediction that is in the answer: the official script takes the package's recall, but hands
    over the two texts in each other's place.

    Raises:
        UserError: the package is not installed, or the model is neither on this machine nor to be had.
    """
    if not answer.strip() or not (prediction or "None").strip():
        return 0.0  # the package's own number, which it reaches with transformers 4 only
    # Its tokenizer cannot read half a character.
    wanted, said = (text.encode(errors="replace").decode() for text in (answer, prediction or "None"))
    _, recall, _ = _scorer().score([wanted], [said])
    return min(max(float(recall), 0.0), 1.0)  # similarities may be a rounding below 0 or above 1


@lru_cache(maxsize=1)
def _scorer() -> Any:
    library = import_extra("bert_score", "bertscore", "scores by BERTScore")
    from huggingface_hub import constants, try_to_load_from_cache

    from ..data.longbench.hub import is_offline, reachable

    way_out = (
        f"bring the model {_ENGLISH_MODEL} into the cache ({constants.HF_HUB_CACHE}) from a machine with network, or "
        "name a mirror in HF_ENDPOINT"
    )
    here = Path(_ENGLISH_MODEL).is_dir() or isinstance(try_to_load_from_cache(_ENGLISH_MODEL, "config.json"), str)
    if not (here or is_offline() or reachable(constants.ENDPOINT)):
        raise UserError(f"scores by BERTScore need a model: {constants.ENDPOINT} is out of reach; {way_out}")
    try:
        return library.BERTScorer(lang="en")
    except (OSError, ValueError) as error:  # what transformers raises for a model that it cannot have
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"scores by BERTScore need a model: {reason}; {way_out}") from error


def cloze_exact(prediction: str, answers: Sequence[str]) -> float:
    """The share of masks that were named as in the answer.

    Args:
        prediction: a dictionary of masks as Python or JSON writes it, and nothing else.
        answers: one, the right dictionary as JSON.
    """
    return _share("cloze_exact", prediction, answers, lambda said, right: bool(said == right))


def cloze_partial(prediction: str, answers: Sequence[str]) -> float:
    """The share of masks whose name has a word in common with the right one; arguments as of `cloze_exact`."""
    return _share(
        "cloze_partial",
        prediction,
        answers,
        lambda said, right: isinstance(said, str) and not set(said.split()).isdisjoint(right.split()),
    )


def _share(metric: str, prediction: str, answers: Sequence[str], alike: Callable[[Any, str], bool]) -> float:
    like = """'{"<mask-0>": "a name"}'"""
    right = json_answer(metric, answers, lambda name: isinstance(name, str), like)
    try:
        said = ast.literal_eval(prediction)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return 0.0
    if not isinstance(said, dict):
        return 0.0
    return sum(mask in said and alike(said[mask], name) for mask, name in right.items()) / len(right)
