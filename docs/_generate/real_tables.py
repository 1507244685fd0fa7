"""The tables of real models, made of the rows that are kept. Most are one shape: policies down, something across."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from measured import RESULTS
from pandas import DataFrame, Series, concat
from real_rows import (
    EIGHTH,
    QUARTER,
    SUITES,
    TOKENS,
    able,
    answered,
    cell,
    finished,
    full,
    less,
    load,
    once,
    percent,
    scored,
    tables,
)
from writing import table

#: What the default was before it looked at queries: its rows of that time bear this name.
FORMER = "calibrated@global"
#: Shares of the prompt by the names of budgets: of needles' prompts, about 890 tokens, and of texts.
SHARES = {"6%": "6 %", "12.5%": "12.5 %", "25%": "25 %", "50%": "50 %"}
SHARES |= {"56": "6 %", EIGHTH: "12.5 %", QUARTER: "25 %", "448": "50 %"}
#: What stands beside kvpress, with room for about 40 tokens of question and answer, which kvpress holds besides.
_PRESSED = ("auto", FORMER, "self_calibrated@global", "paged_eviction", "tova", "snapkv", "expected_attention")
_PRESSED += ("keydiff", "kvzip@global", "leverage")
_PRESSED_BUDGETS = (EIGHTH, QUARTER, "152", "264")
#: By model: numbers per token in each layer that evicts, how many such layers there are, and the bytes of the others:
#: 15 of Gemma's hold the newest 511 tokens in float32.
_SHAPES = {"smollm2": (3 * 2 * 64, 30, 0), "gemma3": (1 * 2 * 256, 3, 15 * 511 * 2 * 256 * 4)}
#: Tokens of which few bits hold a copy as they came: four first ones, the newest block, and the mean and the sizes of
#: channels that all of them share.
_AS_THEY_CAME = 4 + 16 + 2
#: Of running text, and of questions that were not known and known.
_SIDES = ("text: nats lost", "unknown: right, %", "KL", "known: right, %", "KL")
#: A cell out of the rows behind it.
Shown = Callable[[DataFrame], str]


def apart(group: DataFrame, digits: int = 2) -> str:
    """Divergence from the full cache."""
    return cell(group["kl"], digits)


def closely(group: DataFrame) -> str:
    return apart(group, 3)


def right(group: DataFrame) -> str:
    return percent(group["score"])


def pivot(frame: DataFrame, shown: Shown, policies: Iterable[str], columns: dict[str, str], by: str = "budget") -> str:
    """Policies down; across the columns with the titles given, values of `by`."""
    cells = {key: shown(group) for key, group in frame.groupby(["policy", by])}
    lines = [(f"`{policy}`", *(cells.get((policy, column), "") for column in columns)) for policy in policies]
    return table(("policy", *columns.values()), lines)


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


# ---- one budget -----------------------------------------------------------------------------------------------------


def front_table(name: str = "smollm2") -> str:
    """One budget, one line per policy: running text, and questions that were not known and known."""
    texts = finished(load(name, "text"))
    lost = (-less(texts, "loss"))[texts["budget"] == "25%"].groupby(texts["policy"]).agg(cell, 2)
    sides = [_needles(name, protocol) for protocol in ("unknown", "known")]
    if not all((side["policy"] == "auto").any() for side in sides):
        return "No rows."
    far = [side.groupby("policy")["kl"].mean() for side in sides]
    order = (far[0] + far[1]).dropna().sort_values(kind="stable").index
    lines = [
        [f"`{policy}`", lost.get(policy, "not run")]
        + [shown(side[side["policy"] == policy]) for side in sides for shown in (right, apart)]
        for policy in order
    ]
    counts = " and ".join(str(sum(side["policy"] == "auto")) for side in sides)
    shown = table(("policy", *_SIDES), lines)
    return f"{shown}\n\n{len(full(texts))} texts; the same {counts} prompts under all policies."


def _needles(name: str, protocol: str) -> DataFrame:
    """A quarter of needles, over the same prompts that the full cache answers."""
    auto = load(name, f"auto_{protocol}")  # over fewer prompts
    runs = [load(name, f"needles_{protocol}"), auto[auto["policy"].isin(["auto", "full"])]]
    runs = [complete for frame in runs if len(complete := finished(frame))]
    same = set.intersection(*(set(frame["prompt"]) for frame in runs)) if runs else set()
    frame = answered(concat([*runs, load("", "")]))
    return frame[frame["prompt"].isin(same) & (frame["budget"] == QUARTER)]


def task_table(name: str, protocol: str) -> str:
    """A quarter: policies down, tasks across; what each answers in %."""
    needles = _needles(name, protocol)
    if needles.empty:
        return "No rows."
    counts = needles[needles["policy"] == needles["policy"].iloc[0]].groupby("task", sort=False).size()
    titles = {task: f"{task.removeprefix('ruler_niah_')} (n = {count})" for task, count in counts.items()}
    scores = needles.groupby("policy", sort=False)["score"].mean()
    order = scores.sort_values(ascending=False, kind="stable").index
    return pivot(needles, right, order, titles, "task")


# ---- over all runs of one protocol ----------------------------------------------------------------------------------


def _rows(name: str, of: str, question_known: bool | None) -> DataFrame:
    """Rows with the `bits` of their protocol, which may differ in blocks; of tasks, what the full cache answers."""
    frames = [load("", "").assign(bits=16)]
    for terms, frame in tables():
        if (terms["model"], terms["of"]) != (name, of):
            continue
        fits = terms.get("question_aware") == question_known if of == "tasks" else terms.get("chunk") == 64
        if fits and not any(terms.get(term) for term in ("heads", "max_length", "suite")):
            frames.append((frame if of == "texts" else answered(frame)).assign(bits=int(terms.get("bits") or 16)))
    return concat(frames)


def compared(name: str, policy: str = "auto") -> str:
    """Nats lost in text, and needles that are kept with the question unknown and known: three tables."""
    parts = []
    for title, of, question_known in (
        ("Running text, nats lost", "texts", None),
        ("Needles, question unknown, right in %", "tasks", False),
        ("Needles, question known, right in %", "tasks", True),
    ):
        frame = _rows(name, of, question_known).query("bits == 16")
        own = (frame["policy"] == policy) & (frame["block_size"] == 16) & frame["budget"].isin([*SHARES])
        frame = frame[own | (frame["policy"] == "full")]
        same = finished(once(frame.assign(budget=frame["budget"].map(SHARES).fillna(frame["budget"]))))
        if len(same) == len(full(same)):
            continue
        same = same.assign(lost=-less(same, "loss") if of == "texts" else None)
        columns = {share: share for share in dict.fromkeys(SHARES.values()) if share in set(same["budget"])}
        shown: Shown = (lambda group: cell(group["lost"], 3)) if of == "texts" else right
        parts.append(f"{title} (n = {len(full(same))}):\n\n{pivot(same, shown, [policy], columns)}")
        far = pivot(same, closely, [policy], columns)
        parts.append(folded("KL divergence from the full cache, nats per token", far))
    return "\n\n".join(parts)


def over_bytes(question_known: bool, policies: Sequence[str], name: str = "smollm2") -> str:
    """Needles: policies, bits and tokens, with the bytes that they took, those of 16 bits as in bfloat16."""
    frame = _rows(name, "tasks", question_known)
    chosen = Series(
        [budget in TOKENS[bits] for budget, bits in zip(frame["budget"], frame["bits"], strict=True)], dtype=bool
    )
    own = frame["policy"].isin(policies) & (frame["block_size"] == 16) & chosen.to_numpy()
    labels = frame["policy"] + ", " + frame["bits"].astype(str)
    frame = frame.assign(policy=labels.where(own, "full"))[own | (frame["policy"] == "full")]
    few = frame[(frame["bits"] < 16) & (frame["policy"] != "full")]
    same = finished(once(frame), {*zip(few["policy"], few["budget"], strict=True)} or None)
    lines = []
    for (label, tokens), group in same[same["policy"] != "full"].groupby(["policy", "budget"], sort=False):
        policy, bits = label.split(", ")
        took = _bytes(name, group, int(bits)).mean()
        lines.append((policy, took, (f"`{policy}`", bits, tokens, f"{100 * took:.1f}", right(group), closely(group))))
    header = ("policy", "bits", "tokens", "bytes, % of the full cache", "right, %", "KL")
    shown = table(header, [cells for *_, cells in sorted(lines, key=lambda line: line[:2])])
    return f"{len(full(same))} prompts that the full cache answers:\n\n{shown}" if lines else "No rows."


def _bytes(name: str, group: DataFrame, bits: int) -> Series:
    """Shares of the bytes of the whole prompt in bfloat16. Everything was computed in float32."""
    numbers, layers, others = _SHAPES[name]
    tokens = group["budget_tokens"] / group["prompt_tokens"]
    took = (group["kv_bytes"].astype(float) - others) / layers - _AS_THEY_CAME * numbers * 2
    share = took / (group["prompt_tokens"] * numbers * 2)
    return tokens if bits == 16 else share.fillna(tokens)


def beside_kvpress(name: str = "smollm2") -> str:
    """kvpress and our policies on the same needles, question unknown: ours first, and those that diverge least."""
    path = RESULTS / f"kvpress_{name}.json"
    kvpress = DataFrame(json.loads(path.read_text("utf-8"))["rows"])
    kvpress = kvpress.assign(prompt=kvpress["task"] + " " + kvpress["id"]).rename(columns={"press": "policy"})
    kvpress = answered(kvpress)
    prompts = set(kvpress["prompt"])
    ours = _rows(name, "tasks", False).query("bits == 16 and block_size == 16")
    ours = once(ours[ours["prompt"].isin(prompts)])
    ours = ours[ours["policy"].isin(_PRESSED) & ours["budget"].isin(_PRESSED_BUDGETS)]
    pressed = kvpress[kvpress["tokens"].notna()]
    pressed = pressed.assign(budget=pressed["tokens"].astype(int).astype(str), policy=pressed["policy"])
    lines = [
        (
            (other, tokens, group["kl"].mean()),
            (f"{'kvpress: ' * other}`{policy}`", tokens, right(group), closely(group)),
        )
        for other, frame in enumerate((ours, pressed))
        for (tokens, policy), group in frame.groupby(["budget", "policy"], sort=False)
        if len(group) == len(prompts)
    ]
    return f"n = {len(prompts)}:\n\n" + table(("", "tokens", "right, %", "KL"), [line for _, line in sorted(lines)])


# ---- whole suites ---------------------------------------------------------------------------------------------------


def course(name: str, run: str) -> str:
    """Score, length, end and repetition of answers, and what a modifier around a policy takes of its repetition."""
    frame = finished(load(name, run))
    if frame.empty:
        return "No rows."
    groups, taken = dict(list(frame.groupby(["policy", "budget"], sort=False))), []
    for (policy, budget), group in groups.items():
        inner = policy.removesuffix(")").partition("(")[2]
        if (inner, budget) in groups:
            plain = group["question"].map(groups[inner, budget].set_index("question")["repeated"])
            taken.append(f"`{policy}` than `{inner}` at {budget}: {cell(100 * (plain - group['repeated']))}")
    ends = f"\n\nLess repeated, %: {'; '.join(taken)}." if taken else ""
    return f"n = {frame['question'].nunique()}:\n\n{course_table(frame)}{ends}"


def course_table(frame: DataFrame) -> str:
    """Score, length, end and repetition of answers, and the two differences to the full cache's that are paired."""
    frame = frame.assign(less=100 * less(frame, "score"), more=-100 * less(frame, "repeated"))
    ordered, lines = concat([full(frame), frame[frame["policy"] != "full"]]), []
    for (policy, budget), group in ordered.groupby(["policy", "budget"], sort=False):
        tokens, repeated = cell(group["new_tokens"]), cell(100 * group["repeated"])
        paired = ("", "", "") if policy == "full" else (budget, cell(group["less"]), cell(group["more"]))
        score, ended = cell(100 * group["score"]), percent(group["ended"])
        lines.append((f"`{policy}`", paired[0], score, paired[1], tokens, ended, repeated, paired[2]))
    return table(("policy", "budget", "score", "less", "tokens", "ended, %", "repeated, %", "more"), lines)


def heads_apart(name: str) -> str:
    """What it changes that each KV head evicts its own tokens: divergence in needles and texts, paired by question."""
    parts, by = [], ["policy", "question"]
    for title, runs, size in (
        ("unknown", ("needles_unknown", "every_unknown"), QUARTER),
        ("known", ("needles_known", "every_known"), QUARTER),
        ("text", ("text",), "25%"),
    ):
        together = concat([load(name, run) if title == "text" else answered(load(name, run)) for run in runs])
        together = together[together["budget"] == size].drop_duplicates(by, keep="last")[[*by, "kl"]]
        apart = load(name, f"heads_{title}")
        pairs = apart[apart["budget"] == size].merge(together, on=by, suffixes=("", "_together"))
        most = pairs.groupby("policy").size().max()
        cells = {f"`{policy}`": _pair(group, most) for policy, group in pairs.groupby("policy")}
        columns = [f"{title}: together", "apart", f"more (n = {most})"]
        parts.append(DataFrame.from_dict(cells, orient="index", columns=columns))
    lines = concat(parts, axis=1).fillna("").sort_index(key=lambda names: names.str.strip("`"))
    return table(("policy", *lines.columns), lines.itertuples(name=None))


def _pair(group: DataFrame, most: int) -> tuple[str, str, str]:
    """Both means, and the mean of the differences with its error; how many there are, if not `most`."""
    count = f" (n = {len(group)})" if len(group) < most else ""
    difference = cell(group["kl"] - group["kl_together"], 2)
    return f"{group['kl_together'].mean():.2f}", f"{group['kl'].mean():.2f}", difference + count


def overview(name: str, share: str = "25%") -> str:
    """Divergence over all prompts of a suite, and scores in tasks that the model does, at one share of the prompt.

    Over the questions that the default has answered; policies that stand in more than a quarter of the suites.
    """
    suites: dict[str, DataFrame] = {}
    for run, title in SUITES.items():
        frame = load(name, run)
        if (frame["policy"] == "auto").any() and frame["new_tokens"].isna().all():
            same = finished(frame, {("auto", share)})
            suites[title] = same[(same["budget"] == share) | (same["policy"] == "full")]
    if not suites:
        return "No rows."
    far = concat({title: frame.groupby("policy")["kl"].mean() for title, frame in suites.items()}, axis=1).drop("full")
    order = far.mean(axis=1)[4 * far.count(axis=1) > len(suites)].sort_values(kind="stable").index
    good = {title: right for title, frame in suites.items() if len(right := able(frame))}
    return (
        f"KL divergence from the full cache, nats per token:\n\n{_across(suites, order, apart)}\n\n"
        f"Right, %, in the tasks that the full cache does in 60 % of the cases:\n\n"
        f"{_across(good, ['full', *order], scored)}"
    )


def _across(suites: dict[str, DataFrame], policies: Collection[str], shown: Shown) -> str:
    """Suites down, with their prompts; policies across."""
    lines = []
    for title, frame in suites.items():
        groups = {policy: shown(group) for policy, group in frame.groupby("policy")}
        lines.append([title, str(sum(frame["policy"] == "auto")), *(groups.get(policy, "") for policy in policies)])
    return table(("suite", "n", *(f"`{policy}`" for policy in policies)), lines)


# ---- the page -------------------------------------------------------------------------------------------------------


#: What `auto` was when the rows of these tables were measured.
DEFAULT_THEN = "`observed@global`"
#: By name of a table a function, and what it is given.
_TABLES: dict[str, tuple[Any, ...]] = {
    "front": (front_table, "smollm2"),
    "gemma-front": (front_table, "gemma3"),
    "tasks-unknown": (task_table, "smollm2", "unknown"),
    "tasks-known": (task_table, "smollm2", "known"),
    "default": (compared, "smollm2"),
    "long": (course, "smollm2", "long"),
    "heads": (heads_apart, "smollm2"),
    "suites": (overview, "smollm2"),
    "gemma": (overview, "gemma3"),
    "kvpress": (beside_kvpress, "smollm2"),
    "bits-unknown": (over_bytes, False, ("auto",)),
    "bits-known": (over_bytes, True, ("auto",)),
    "gemma-bits": (over_bytes, False, ("auto", "tova"), "gemma3"),
}


def real(name: str) -> str:
    """One of them."""
    make, *arguments = _TABLES[name]
    return make(*arguments).replace("`auto`", DEFAULT_THEN)
