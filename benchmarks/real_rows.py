"""The rows of real models that are kept: their files, their protocols, and which of them may be compared."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from common import RESULTS
from pandas import DataFrame, MultiIndex, Series

from hf_paged_eviction_eval.report.means import wilson

KEPT = RESULTS / "real_models"
Row = dict[str, Any]
#: Tokens of a needle's prompt of about 890 that are an eighth and a quarter.
EIGHTH, QUARTER = "112", "224"
#: Settings that change no number, or that the rows tell by themselves.
_PASSED_OVER = frozenset(
    "agreement allow_pickle attn_implementation batch_size budgets data_dir device device_map files haystack "
    "limit model policies share_prefill task_file tasks tokenizer trust_remote_code".split()
)
#: Who computed ROUGE and compared lines of code, which rows once said: there is no other any more.
_OFFICIAL = (("edit_similarity", "difflib"), ("rouge", "official"))


# ---- files and protocols --------------------------------------------------------------------------------------------


@cache
def read_kept(path: Path) -> tuple[Row, list[Row]]:
    """Facts and rows of a file of kept rows."""
    facts, *rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return facts, rows


def load(name: str, table: str) -> DataFrame:
    """The rows of a model's table; none if it was not run."""
    path = KEPT / f"{name}_{table}.jsonl.gz"
    return as_frame(read_kept(path)[1] if path.exists() else [])


def as_frame(rows: Iterable[Row]) -> DataFrame:
    """One long table. Of texts, `kl` and `loss` are means per token of the second half."""
    frame = DataFrame([{**dict.fromkeys(_COLUMNS), **row, **_row_facts(row)} for row in rows])
    return frame if len(frame) else DataFrame(columns=[*_COLUMNS, "question", "prompt"])


_COLUMNS = "policy budget task text score kl loss".split()


def _row_facts(row: Row) -> dict[str, Any]:
    if "text" in row:
        half = len(row["count"]) // 2
        late = {name: float(sum(row[name][half:]) / sum(row["count"][half:])) for name in ("kl", "loss")}
        return {"question": row["text"], "prompt": row["text"], **late}
    apart = (row.get("agreement") or {}).get("kl")
    return {
        "question": f"{row['task']} {row.get('length')} {row['id']}",
        "prompt": f"{row['task']} {row['id']}",
        "kl": apart,
    }


def protocol(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for rows to share a table, from what the run of a model wrote down of itself."""
    settings = {key: value for key, value in meta["settings"].items() if key not in _PASSED_OVER}
    data = {task: facts["sha256"] for task, facts in meta.get("tasks", {}).items() if facts.get("sha256")}
    model = {key: meta.get("model", {}).get(key) for key in ("class", "parameters")}
    precision = meta.get("model", {}).get("dtype", settings.get("dtype"))
    terms = {"model": name, **model, "of": "texts" if "files" in meta["settings"] else "tasks", **settings, **data}
    return {**terms, "dtype": precision, "transformers": meta["versions"]["transformers"]}


def without_defaults(terms: dict[str, Any]) -> dict[str, Any]:
    """A protocol without what is off: an option that came later makes no other protocol of a run without it."""

    def off(key: str, value: Any) -> bool:
        if (key, value) in _OFFICIAL:
            return True
        return key not in ("question_aware", "seed") and (value in (None, "drop", []) or value == 0)

    return {key: value for key, value in terms.items() if not off(key, value)}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two protocols differ in, but for the records of tasks that one of them does not have."""
    before, now = without_defaults(before), without_defaults(now)
    both = before.keys() & now.keys()
    apart = [key for key, value in (before | now).items() if key in both or not isinstance(value, dict)]
    return sorted(key for key in apart if before.get(key) != now.get(key))


# ---- which rows -----------------------------------------------------------------------------------------------------


def finished(frame: DataFrame, among: Collection[Any] | None = None) -> DataFrame:
    """Rows of caches that have answered the same questions, as many rows as possible.

    Args:
        among: policies and budgets whose questions decide; None = all.
    """
    questions_of = frame.groupby(["policy", "budget"], sort=False)["question"].agg(frozenset).to_dict()
    deciding = {variant: questions for variant, questions in questions_of.items() if among is None or variant in among}
    counts = Counter(chain.from_iterable(deciding.values()))
    choices = [
        frozenset(question for question in counts if counts[question] >= least) for least in set(counts.values())
    ]
    choices += deciding.values()
    most = max(choices, key=lambda them: len(them) * sum(own >= them for own in deciding.values()), default=frozenset())
    whole = [variant for variant, questions in questions_of.items() if questions >= most]
    return frame[frame["question"].isin(most) & MultiIndex.from_frame(frame[["policy", "budget"]]).isin(whole)]


def full(frame: DataFrame) -> DataFrame:
    """Rows of the full cache."""
    return frame[frame["policy"] == "full"]


def less(frame: DataFrame, column: str) -> Series:
    """How much more the full cache has of a column, for the same question."""
    return frame["question"].map(full(frame).set_index("question")[column]) - frame[column]


def answered(frame: DataFrame) -> DataFrame:
    """Rows of the prompts that the full cache answers."""
    return frame[frame["prompt"].isin(full(frame).query("score == 1")["prompt"])]


# ---- numbers --------------------------------------------------------------------------------------------------------


def percent(values: Series) -> str:
    """The share that is right in percent, and in brackets where it lies with a probability of 95 % (Wilson)."""
    right, count = float(values.sum()), len(values)
    least, most = wilson(right / count, count)
    return f"{100 * right / count:.0f} [{least:.0f}, {most:.0f}]"
