"""How to read the numbers: only the rules behind what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from .depths import depth_of
from .runs import Run

Rule = tuple[str, str]


def rules(runs: Sequence[Run]) -> list[Rule]:
    """Terms and their explanations."""
    rows = [row for run in runs for row in run.rows]
    tasks = {task for run in runs for task in run.tasks}
    shown = {
        "rows": bool(rows),
        "longbench": any(task in TASKS for task in tasks),
        "v1": any(task in TASKS and not TASKS[task].is_e for task in tasks),
        "e": any(task in TASKS and TASKS[task].is_e for task in tasks),
        "v2": V2 in tasks,
        "needles": any(depth_of(row.get("metadata")) is not None for run in runs for row in run.rows),
        "agreement": any(row.get("agreement") for row in rows),
        "efficiency": any(row.get("efficiency") for row in rows),
        "texts": any(run.texts for run in runs),
        "any": True,
        "several": len(runs) > 1,
    }
    places = {"question": _question(runs), "backends": _backends(runs)}
    return [(term, text.format(**places)) for what, term, text in _RULES if shown[what]]


#: What has to be shown, the term, and its explanation.
_RULES = (
    (
        "rows",
        "Score",
        "100 times the mean over the answers, rounded to two digits. Bold: the best policy at that budget in that "
        "column, none where all are equal. A difference of less than about two standard errors says little.",
    ),
    ("rows", "Question", "{question}"),
    (
        "longbench",
        "LongBench",
        "Prompts, truncation in the middle, chat template, stop rules, first-line rule and metrics of the official "
        "code; metric backends: {backends}. Numbers of other harnesses follow other rules.",
    ),
    (
        "v1",
        "Macro mean",
        "The official average of LongBench: the mean of the means of the six categories (single- and multi-document "
        "QA, summarization, few-shot, synthetic, code).",
    ),
    (
        "v1",
        "Plain mean",
        "What papers on cache compression report: the mean of the 16 English and code tasks. Both means exist only "
        "when every one of their tasks has a score, and start from the rounded scores of the tasks.",
    ),
    (
        "e",
        "LongBench-E",
        "Three buckets by the record's own length in words: below 4000, below 8000, and the rest. There is no official "
        "overall number; the mean shown is over the tasks of the bucket.",
    ),
    ("v2", "LongBench v2", "Accuracy over four-way questions, one digit; an answer that cannot be read is wrong."),
    ("needles", "Depth", "Where the needle lies: 0 % is the beginning of the prompt, 100 % its end."),
    (
        "agreement",
        "Agreement",
        "Identical tokens: share of the full cache's answer that stands at the same place in this answer; one early "
        "difference moves everything behind it. KL: mean divergence of the next-token distribution from the full "
        "cache's, in nats, while the full cache's answer is fed.",
    ),
    (
        "efficiency",
        "Efficiency",
        "Time per token is one decoding step of a batch; tokens per second count all its rows, without the first token "
        "of an answer, which the prefill gives. Inside the cache is the part of a step spent in storing and evicting. "
        "KV held is what the cache keeps after the answer. Peak memory is the device's, or the process's on a CPU; "
        "there is none where caches share a prefill, because it would be that of all of them.",
    ),
    (
        "texts",
        "Perplexity",
        "exp of the mean negative log-likelihood over all predicted tokens of all texts, read in chunks through the "
        "cache; lower is better. Models with different tokenizers cannot be compared by it.",
    ),
    (
        "any",
        "Budget",
        "Tokens that each layer may hold per sequence, rounded up to whole blocks. A share is of the prompt's length, "
        "and at least the smallest legal budget. The full cache holds everything and evicts nothing.",
    ),
    (
        "several",
        "Several runs",
        "A run is named by the settings in which it differs from the others; folders that differ only in what they "
        "cover (tasks, lengths, policies, budgets) are one run. Differences are taken over the questions that both "
        "runs answered.",
    ),
)


def _question(runs: Sequence[Run]) -> str:
    settings = [source.settings for run in runs for source in run.sources]
    stated = {bool(run["question_aware"]) for run in settings if run.get("question_aware") is not None}
    stated |= {bool(row["question_aware"]) for run in runs for row in run.rows if row.get("question_aware") is not None}
    aware = "the question stood in the prompt when the cache was compressed, as in the papers"
    agnostic = "the cache was compressed before the question was read"
    if stated == {True}:
        return f"In this report {aware}."
    if stated == {False}:
        return f"In this report {agnostic}."
    return f"Question-aware runs: {aware}. Question-agnostic runs: {agnostic}. Their scores cannot be compared."


def _backends(runs: Sequence[Run]) -> str:
    backends: dict[str, Any] = {}
    for name, default in (("rouge", "official"), ("edit_similarity", "difflib")):
        values = {str(source.settings.get(name) or default) for run in runs for source in run.sources}
        backends[name.replace("_", " ")] = " and ".join(sorted(values))
    return ", ".join(f"{name} {value}" for name, value in backends.items())
