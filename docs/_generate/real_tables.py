"""The tables of real models, made of the rows that are kept. Most are one shape: policies down, something across."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

from common import cell
from memory_tables import MODELS
from pandas import DataFrame, concat
from real_rows import (
    QUARTER,
    answered,
    finished,
    full,
    less,
    load,
    percent,
)
from writing import table, titled

#: Former defaults and what else is gone, of which rows are kept; of texts and needles those of `auto` say which prompts
#: count.
_GONE = re.compile("full|oracle|auto.*|calibrated|self_calibrated|.*@global")
#: Of running text, and of questions that were not known and known.
_SIDES = ("text: nats lost", "unknown: right, %", "KL", "known: right, %", "KL")
#: Models on which published policies were measured.
_PUBLISHED = {name: MODELS[name] for name in ("smollm2", "gemma3")}
#: The model on which separate heads were.
_HEADS = "smollm2"
#: A cell out of the rows behind it.
Shown = Callable[[DataFrame], str]


def apart(group: DataFrame, digits: int = 2) -> str:
    """Divergence from the full cache."""
    return cell(group["kl"], digits)


def shipped(policies: Iterable[str]) -> list[str]:
    """Policies that there still are, in their order, each once."""
    return [policy for policy in dict.fromkeys(policies) if not _GONE.fullmatch(policy)]


def right(group: DataFrame) -> str:
    return percent(group["score"])


def published(_: str) -> str:
    """One budget, one line per model and policy: running text, and questions that were not known and known."""
    made = {name: _policies(name) for name in _PUBLISHED}
    body = [line for name, (lines, _) in made.items() for line in titled(_PUBLISHED[name], lines)]
    counted = "; ".join(f"{_PUBLISHED[name]}: {count}" for name, (_, count) in made.items())
    return f"{table(('model', 'policy', *_SIDES), body)}\n\nThe same under all policies. {counted}."


def _policies(name: str) -> tuple[list[list[str]], str]:
    """Lines of a model, and of how many texts and prompts they are."""
    texts = finished(load(name, "text"))
    lost = (-less(texts, "loss"))[texts["budget"] == "25%"].groupby(texts["policy"]).agg(cell, 2)
    sides = [_needles(name, protocol) for protocol in ("unknown", "known")]
    far = [side.groupby("policy")["kl"].mean() for side in sides]
    order = shipped((far[0] + far[1]).dropna().sort_values(kind="stable").index)
    lines = [
        [f"`{policy}`", lost.get(policy, "not run")]
        + [shown(side[side["policy"] == policy]) for side in sides for shown in (right, apart)]
        for policy in order
    ]
    counts = " and ".join(str(sum(side["policy"] == "auto")) for side in sides)
    return lines, f"{len(full(texts))} texts, {counts} prompts"


def _needles(name: str, protocol: str) -> DataFrame:
    """A quarter of needles, over the same prompts that the full cache answers."""
    auto = load(name, f"auto_{protocol}")  # over fewer prompts
    runs = [load(name, f"needles_{protocol}"), auto[auto["policy"].isin(["auto", "full"])]]
    runs = [complete for frame in runs if len(complete := finished(frame))]
    same = set.intersection(*(set(frame["prompt"]) for frame in runs)) if runs else set()
    frame = answered(concat([*runs, load("", "")]))
    return frame[frame["prompt"].isin(same) & (frame["budget"] == QUARTER)]


def heads_apart(_: str) -> str:
    """What it changes on a model that each KV head evicts its own tokens: divergence in needles and texts, paired by
    question; of policies that are better than `random`."""
    parts, by = [], ["policy", "question"]
    for title, runs, size in (
        ("unknown", ("needles_unknown", "every_unknown"), QUARTER),
        ("known", ("needles_known", "every_known"), QUARTER),
        ("text", ("text",), "25%"),
    ):
        together = concat([load(_HEADS, run) if title == "text" else answered(load(_HEADS, run)) for run in runs])
        together = together[together["budget"] == size].drop_duplicates(by, keep="last")[[*by, "kl"]]
        apart = load(_HEADS, f"heads_{title}")
        pairs = apart[apart["budget"] == size].merge(together, on=by, suffixes=("", "_together"))
        most = pairs.groupby("policy").size().max()
        groups = dict(list(pairs.groupby("policy")))
        better = [policy for policy in shipped(groups) if policy in better_than_random()]
        cells = {f"`{policy}`": _pair(groups[policy], most) for policy in better}
        columns = [f"{title}: together", "apart", f"more (n = {most})"]
        parts.append(DataFrame.from_dict(cells, orient="index", columns=columns))
    lines = concat(parts, axis=1).fillna("").sort_index(key=lambda names: names.str.strip("`"))
    return table(("policy", *lines.columns), lines.itertuples(name=None))


def _pair(group: DataFrame, most: int) -> tuple[str, str, str]:
    """Both means, and the mean of the differences with its error; how many there are, if not `most`."""
    count = f" (n = {len(group)})" if len(group) < most else ""
    difference = cell(group["kl"] - group["kl_together"], 2)
    return f"{group['kl_together'].mean():.2f}", f"{group['kl'].mean():.2f}", difference + count


@cache
def better_than_random() -> frozenset[str]:
    """Policies that answer more needles than `random` on SmolLM2 or Gemma, or lose less of a text, by more than twice
    the error."""
    found: set[str] = set()
    for name in _PUBLISHED:
        texts = finished(load(name, "text"))
        texts = texts.assign(score=less(texts, "loss"))  # the higher the better
        for frame in (texts[texts["budget"] == "25%"], *(_needles(name, side) for side in ("unknown", "known"))):
            scores = frame.groupby("policy")["score"].agg(["mean", "sem"]).astype(float)
            gain = scores["mean"] - scores.loc["random", "mean"]
            error = (scores["sem"] ** 2 + scores.loc["random", "sem"] ** 2) ** 0.5
            found |= {*shipped(scores.index[gain > 2 * error])}
    return frozenset(found)
