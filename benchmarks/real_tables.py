"""The tables of real models, made of the rows that are kept. Most are one shape: policies down, something across."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from common import RESULTS
from real_rows import (
    Groups,
    Row,
    able,
    answered,
    apart,
    by_task,
    by_variant,
    cell,
    divergence,
    finished,
    full,
    late,
    load,
    once,
    percent,
    prompt,
    question,
    tables,
)

#: Tokens of a needle's prompt of about 890 that are an eighth and a quarter.
EIGHTH, QUARTER = "112", "224"
#: What a cache is in tables that compare: a policy and the tokens of its blocks.
Cache = tuple[str, int]
#: What the default was before it looked at queries: its rows of that time bear this name.
FORMER = "calibrated@global"
DEFAULT: tuple[Cache, ...] = (("auto", 16), (FORMER, 16))
_OTHERS = ("self_calibrated@global", "paged_eviction", "tova", "snapkv")
BESIDE: tuple[Cache, ...] = (*DEFAULT, ("auto", 4), (FORMER, 4), *((policy, 16) for policy in _OTHERS))
#: Scores of 2026 and what they stand beside.
NEWEST = ("gate:smollm2-kvzip.safetensors@global", "vase(tova)", "vase(snapkv)")
#: Shares of the prompt by the names of budgets: of needles' prompts, about 890 tokens, and of texts.
SHARES = {"56": "6 %", "112": "12.5 %", "224": "25 %", "448": "50 %"}
SHARES |= {f"{share}%": f"{share} %" for share in ("6", "12.5", "25", "50")}
#: What stands beside kvpress, with room for about 40 tokens of question and answer, which kvpress holds besides.
_PRESSED = (*(policy for policy, _ in BESIDE), "expected_attention", "keydiff", "kvzip@global", "leverage", NEWEST[0])
_PRESSED_BUDGETS = (EIGHTH, QUARTER, "152", "264")
#: By bits of a number, the tokens that are held of needles' prompts. Runs ask for these.
TOKENS = {
    16: ("56", "112", "224"),
    8: ("64", "160", "368"),
    4: ("112", "192", "320", "560", "720"),
    2: ("208", "560", "1024"),
}
#: By model: numbers per token in each layer that evicts, how many such layers there are, and the bytes of the others:
#: 15 of Gemma's hold the newest 511 tokens in float32.
_SHAPES = {"smollm2": (3 * 2 * 64, 30, 0), "gemma3": (1 * 2 * 256, 3, 15 * 511 * 2 * 256 * 4)}
#: Tokens of which few bits hold a copy as they came: four first ones, the newest block, and the mean and the sizes of
#: channels that all of them share.
_AS_THEY_CAME = 4 + 16 + 2
#: Tokens of RULER's prompts, and by table what its column is called. Their rows stand in tables of their own on the
#: leaderboard, since the settings of some are those of the needles.
LENGTHS = (1024, 2048, 4096, 8000)
SUITES = {
    "long": "long answers",
    "longbench": "LongBench, own answers",
    "longbench_forced": "LongBench",
    "longeval": "LongEval",
    "turns": "turns",
    **{f"ruler{n}_{side}": f"RULER {round(n / 1024)}k, {side}" for n in LENGTHS for side in ("unknown", "known")},
}


# ---- shapes ---------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown; numbers from the second column on."""
    rows = [header, ("---", *["---:"] * (len(header) - 1)), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def pivot(
    groups: dict[Any, Any],
    shown: Callable[[Any], str],
    policies: Iterable[str],
    columns: dict[Any, str] | None = None,
) -> str:
    """Policies down; across budgets, or columns with the titles given."""
    columns = columns or {column: column for _, column in groups}
    lines = [
        (f"`{policy}`", *(shown(groups[policy, column]) if (policy, column) in groups else "" for column in columns))
        for policy in policies
    ]
    return table(("policy", *columns.values()), lines)


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def ranked(groups: Groups, measure: Callable[[Any], float] = divergence) -> list[str]:
    """Policies, the smallest mean over its columns first."""
    means: dict[str, list[float]] = defaultdict(list)
    for (policy, _), group in groups.items():
        means[policy].append(measure(group))
    return sorted(means, key=lambda policy: fmean(means[policy]))


# ---- one run --------------------------------------------------------------------------------------------------------


def run_tables(rows: Sequence[Row]) -> str:
    """Rows of texts or of answers, over the same questions."""
    return text_tables(rows) if "text" in rows[0] else answer_tables(rows)


def text_tables(rows: Sequence[Row]) -> str:
    """What the second half of the texts loses, and how far it diverges: texts that all variants have read."""
    rows, _ = finished(rows)
    texts, groups = {row["text"]: row for row in full(rows)}, by_variant(rows)
    order = ranked(groups, lambda group: fmean(late(row, "kl") for row in group))
    base = fmean(late(row, "loss") for row in texts.values())
    return (
        f"{len(texts)} texts ({', '.join(sorted(texts))}), second half of 1,024 tokens; full cache {base:.3f} nats "
        f"per token. Nats lost:\n\n{pivot(groups, lambda group: _lost(group, texts), order)}\n\n"
        f"KL divergence from the full cache, nats per token:\n\n{pivot(groups, _far, order)}"
    )


def _lost(group: Iterable[Row], texts: dict[Any, Row], digits: int = 3) -> str:
    return cell((late(row, "loss") - late(texts[row["text"]], "loss") for row in group), digits)


def _far(group: Iterable[Row]) -> str:
    return cell((late(row, "kl") for row in group), 3)


def answer_tables(rows: Sequence[Row]) -> str:
    """Scores and divergences of the tasks that the model is able to do; divergences of the others."""
    rows, _ = finished(rows)
    if all("new_tokens" in row for row in rows):
        return own_tables(rows)
    if all(row["score"] in (0, 1) for row in full(rows)) and answered(rows):
        return needle_tables(rows)
    scores, good = by_task(full(rows)), able(rows)
    listed = ", ".join(f"{task} {100 * fmean(each):.0f} (n = {len(each)})" for task, each in scores.items())
    parts = [f"Full cache, %: {listed}."]
    if chosen := by_variant(row for row in rows if row["task"] in good):
        right, far = (pivot(chosen, shown, ranked(chosen)) for shown in (_mean_score, apart))
        parts.append(f"Accuracy in %, {', '.join(good)}:\n\n{right}")
        parts.append(f"KL divergence along the full cache's answers, nats per token:\n\n{far}")
    if others := by_variant(row for row in rows if row["task"] not in good):
        names, far = ", ".join(task for task in scores if task not in good), pivot(others, apart, ranked(others))
        parts.append(f"Too hard for this model ({names}): KL divergence alone\n\n{far}")
    return "\n\n".join(parts)


def _mean_score(group: Iterable[Row]) -> str:
    return cell(100 * row["score"] for row in group)


def own_tables(rows: Sequence[Row]) -> str:
    """Answers that every cache gave by itself: their scores, and how they went on and ended."""
    scores = by_task(full(rows))
    parts = [f"{sum(map(len, scores.values()))} answers of each cache's own.\n\n{course_table(rows)}"]
    if len(scores) > 1:
        variants = {f"{policy} {budget}": by_task(group) for (policy, budget), group in by_variant(rows).items()}
        variants = {"full": scores, **variants}
        lines = [
            (task, str(len(each)), *(f"{100 * fmean(tasks[task]):.0f}" for tasks in variants.values()))
            for task, each in scores.items()
        ]
        names = (f"`{name}`" for name in variants)
        parts.append(folded("Mean score by task", table(("task", "n", *names), lines)))
    return "\n\n".join(parts)


def course_table(rows: Sequence[Row]) -> str:
    """Score, length, end and repetition of answers, and the two differences to the full cache's that are paired."""
    own, lines = {question(row): row for row in full(rows)}, []
    for (policy, budget), group in {("full", ""): list(own.values()), **by_variant(rows)}.items():

        def beyond(name: str, sign: int, group: Sequence[Row] = group, policy: str = policy) -> str:
            differences = [100 * sign * (row[name] - own[question(row)][name]) for row in group]
            return "" if policy == "full" else cell(differences)

        said, repeated = cell(row["new_tokens"] for row in group), cell(100 * row["repeated"] for row in group)
        scores = _mean_score(group), beyond("score", -1)
        lines.append((f"`{policy}`", budget, *scores, said, percent(group, "ended"), repeated, beyond("repeated", 1)))
    return table(("policy", "budget", "score", "less", "tokens", "ended, %", "repeated, %", "more"), lines)


def needle_tables(rows: Sequence[Row]) -> str:
    """Of the prompts that the full cache answers: how many each policy does, and its divergence."""
    listed = ", ".join(
        f"{task.removeprefix('ruler_niah_')} {sum(scores):.0f} of {len(scores)}"
        for task, scores in by_task(full(rows)).items()
    )
    right = answered(rows)
    groups = by_variant(right)
    hits = {key: group for key, group in groups.items() if any("hit_rate" in row for row in group)}
    titles = {budget: budget for _, budget in groups}
    for budget in filter(str.isdecimal, titles):
        share = fmean(row["budget_tokens"] / row["prompt_tokens"] for row in rows if row["budget"] == budget)
        titles[budget] = f"{budget} tokens ({100 * share:.0f} %)"
    parts = [
        f"The full cache answers {len(full(right))} prompts ({listed}). Of these, in %:",
        pivot(groups, percent, ranked(groups), titles),
        "KL divergence along its answers, nats per token:",
        pivot(groups, apart, ranked(groups), titles),
    ]
    if hits:
        held = {budget: titles[budget] for _, budget in hits}
        parts += ["Hit rate, %:", pivot(hits, _hit_rate, ranked(groups), held)]
    return "\n\n".join(parts)


def _hit_rate(group: Iterable[Row]) -> str:
    return cell(100 * row["hit_rate"] for row in group if "hit_rate" in row)


# ---- one budget -----------------------------------------------------------------------------------------------------


def front_table(name: str = "smollm2") -> str:
    """One budget, one line per policy: running text, and questions that were not known and known."""
    rows, _ = finished(load(name, "text"))
    texts = {row["text"]: row for row in full(rows)}
    lost = {policy: _lost(group, texts, 2) for (policy, size), group in by_variant(rows).items() if size == "25%"}
    columns = [_needles(name, asked) for asked in ("unknown", "known")]
    if not all("auto" in column for column in columns):
        return "No rows."
    lines = []
    for policy in sorted(
        set(columns[0]) & set(columns[1]), key=lambda policy: fmean(divergence(column[policy]) for column in columns)
    ):
        pairs = chain.from_iterable((percent(column[policy]), apart(column[policy])) for column in columns)
        lines.append((f"`{policy}`", lost.get(policy, "not run"), *pairs))
    counts = " and ".join(str(len(column["auto"])) for column in columns)
    header = ("policy", "text: nats lost", "unknown: right, %", "KL", "known: right, %", "KL")
    return f"{table(header, lines)}\n\n{len(texts)} texts; the same {counts} prompts under all policies."


def _needles(name: str, asked: str) -> dict[str, list[Row]]:
    """A quarter of needles, by policy, over the same prompts that the full cache answers."""
    runs = [load(name, f"needles_{asked}")]
    for run, policy in (("former", "calibrated"), ("auto", "auto")):  # with other policies, over fewer prompts
        runs.append([row for row in load(name, f"{run}_{asked}") if row["policy"] in (policy, "full")])
    runs = [finished(rows)[0] for rows in runs]
    prompts = [set(map(prompt, rows)) for rows in runs if rows]
    same = set.intersection(*prompts) if prompts else set()
    groups = by_variant(answered([row for row in chain(*runs) if prompt(row) in same]))
    return {policy: group for (policy, size), group in groups.items() if size == QUARTER}


def task_table(name: str, asked: str) -> str:
    """A quarter: policies down, tasks across; what each answers in %."""
    needles = _needles(name, asked)
    if not needles:
        return "No rows."
    counts = Counter(row["task"] for row in next(iter(needles.values())))
    titles = {task: f"{task.removeprefix('ruler_niah_')} (n = {count})" for task, count in counts.items()}
    order = sorted(needles, key=lambda policy: -fmean(row["score"] for row in needles[policy]))
    return pivot(by_variant(chain(*needles.values()), "task"), percent, order, titles)


# ---- over all runs of one protocol ----------------------------------------------------------------------------------


def _rows(name: str, of: str, known: bool | None) -> Iterator[tuple[dict[str, Any], Row]]:
    """Each with its protocol, which may differ in the size of blocks; of tasks, those that the full cache answers."""
    for _, terms, group in tables():
        if terms is None or (terms["model"], terms["of"]) != (name, of):
            continue
        fits = terms.get("question_aware") == known if of == "tasks" else terms.get("chunk") == 64
        if fits and not any(terms.get(each) for each in ("heads", "max_length", "suite")):
            for row in group if of == "texts" else answered(group):
                yield terms, row


def compared(name: str, caches: Sequence[Cache], decide: Collection[str] = ()) -> str:
    """Nats lost in text, and needles that are kept with the question unknown and known: three tables.

    Args:
        decide: policies over whose questions they are; none = over those of most rows.
    """
    labels = {cache: cache[0] if cache[1] == 16 else f"{cache[0]}, blocks of {cache[1]}" for cache in caches}
    parts = []
    for title, of, known in (
        ("Running text, nats lost", "texts", None),
        ("Needles, question unknown, right in %", "tasks", False),
        ("Needles, question known, right in %", "tasks", True),
    ):
        rows = []
        for terms, row in _rows(name, of, known):
            label = labels.get((row["policy"], terms["block_size"]))
            if row["policy"] == "full" and not terms.get("bits"):
                rows.append(row)
            elif label and row["budget"] in SHARES and not terms.get("bits"):
                rows.append(row | {"policy": label, "budget": SHARES[row["budget"]]})
        among = {(row["policy"], row["budget"]) for row in rows if row["policy"] in decide}
        same, _ = finished(once(rows), among or None)
        groups, own = by_variant(same), full(same)
        if not groups:
            continue
        columns = {each: each for each in sorted({each for _, each in groups}, key=lambda each: float(each.split()[0]))}
        order = [label for label in labels.values() if any(policy == label for policy, _ in groups)]
        texts = {row.get("text"): row for row in own}
        shown: tuple[Callable[[Any], str], ...] = (percent, lambda group: apart(group, 3))
        if of == "texts":
            shown = (lambda group, texts=texts: _lost(group, texts)), _far
        right, far = (pivot(groups, each, order, columns) for each in shown)
        parts.append(f"{title} (n = {len(own)}):\n\n{right}")
        parts.append(folded("KL divergence from the full cache, nats per token", far))
    return "\n\n".join(parts)


def over_bytes(
    known: bool, policies: Sequence[str] = (FORMER, "calibrated", "tova", "keydiff"), name: str = "smollm2"
) -> str:
    """Needles: policies, bits and tokens, with the bytes that they took, those of 16 bits as in bfloat16."""
    rows = []
    for terms, row in _rows(name, "tasks", known):
        bits = int(terms.get("bits") or 16)
        if row["policy"] == "full":
            rows.append(row)
        elif row["policy"] in policies and terms["block_size"] == 16 and row["budget"] in TOKENS[bits]:
            rows.append(row | {"policy": f"{row['policy']}, {bits} bits", "bits": bits})
    among = {(row["policy"], row["budget"]) for row in rows if row.get("bits", 16) < 16}
    same, _ = finished(once(rows), among or None)
    lines = []
    for (label, tokens), group in by_variant(same).items():
        policy, bits = label.removesuffix(" bits").split(", ")
        took = _bytes(name, group, int(bits))
        cells = (f"`{policy}`", bits, tokens, f"{100 * took:.1f}", percent(group), apart(group, 3))
        lines.append((policy, took, cells))
    lines.sort(key=lambda line: line[:2])
    header = ("policy", "bits", "tokens", "bytes, % of the full cache", "right, %", "KL")
    shown = table(header, [cells for *_, cells in lines])
    return f"{len(full(same))} prompts that the full cache answers:\n\n{shown}" if lines else "No rows."


def _bytes(name: str, group: Sequence[Row], bits: int) -> float:
    """Mean share of the bytes of the whole prompt in bfloat16. Everything was computed in float32."""
    numbers, layers, others = _SHAPES[name]
    shares = []
    for row in group:
        if bits == 16 or "kv_bytes" not in row:
            shares.append(row["budget_tokens"] / row["prompt_tokens"])
        else:
            took = (row["kv_bytes"] - others) / layers - _AS_THEY_CAME * numbers * 2
            shares.append(took / (row["prompt_tokens"] * numbers * 2))
    return fmean(shares)


def beside_kvpress(name: str = "smollm2") -> str:
    """kvpress and our policies on the same needles, question unknown: ours first, and those that diverge least."""
    path = RESULTS / f"kvpress_{name}.json"
    theirs = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    asked = {prompt(row) for row in theirs if row["press"] == "full" and row["score"] == 1}
    groups: dict[tuple[bool, str, str], list[Row]] = defaultdict(list)
    for row in theirs:
        if prompt(row) in asked and row["tokens"]:
            kept = {"score": row["score"], "agreement": {"kl": row["kl"]}}
            groups[True, str(row["tokens"]), row["press"]].append(kept)
    plain = (row for terms, row in _rows(name, "tasks", False) if terms["block_size"] == 16 and not terms.get("bits"))
    for row in once(row for row in plain if prompt(row) in asked):
        if row["policy"] in _PRESSED and row["budget"] in _PRESSED_BUDGETS:
            groups[False, row["budget"], row["policy"]].append(row)
    lines = [
        (f"{'kvpress: ' * other}`{policy}`", tokens, percent(group), apart(group, 3))
        for (other, tokens, policy), group in sorted(groups.items(), key=lambda one: (*one[0][:2], divergence(one[1])))
        if len(group) == len(asked)
    ]
    return f"n = {len(asked)}:\n\n" + table(("", "tokens", "right, %", "KL"), lines)


# ---- whole suites ---------------------------------------------------------------------------------------------------


def course(name: str, run: str) -> str:
    """Score, length, end and repetition of answers, and what a modifier around a policy takes of its repetition."""
    rows, _ = finished(load(name, run))
    if not rows:
        return "No rows."
    groups, less = by_variant(rows), []
    for (policy, budget), group in groups.items():
        inner = policy.removesuffix(")").partition("(")[2]
        if (inner, budget) in groups:
            plain = {question(row): row["repeated"] for row in groups[inner, budget]}
            taken = cell(100 * (plain[question(row)] - row["repeated"]) for row in group)
            less.append(f"`{policy}` than `{inner}` at {budget}: {taken}")
    ends = f"\n\nLess repeated, %: {'; '.join(less)}." if less else ""
    return f"n = {len({question(row) for row in rows})}:\n\n{course_table(rows)}{ends}"


def everything(name: str) -> str:
    """Divergence of every policy and allocator, question unknown and known, at every share; and what is right."""
    groups: dict[tuple[str, tuple[str, str]], list[Row]] = {}
    counts, columns = [], {}
    for side in ("unknown", "known"):
        same = answered(finished(load(name, f"every_{side}"))[0])
        groups |= {(policy, (side, budget)): group for (policy, budget), group in by_variant(same).items()}
        counts += [f"{side} {len(full(same))}"] if same else []
        for budget in sorted({budget for _, (own, budget) in groups if own == side}, key=int):
            columns[side, budget] = f"{side}, {SHARES[budget]}"
    if not groups:
        return "No rows."
    policies = {policy for policy, _ in groups}
    shared = [column for column in columns if all((policy, column) in groups for policy in policies)]
    far = {policy: divergence(row for column in shared for row in groups[policy, column]) for policy in policies}
    order = sorted(policies, key=lambda policy: (far[policy], policy))
    parts = [f"n: {', '.join(counts)}."]
    for title, shown in (("KL divergence, nats per token", apart), ("Right, %", percent)):
        parts.append(folded(title, pivot(groups, shown, order, columns)))
    return "\n\n".join(parts)


def heads_apart(name: str) -> str:
    """What it changes that each KV head evicts its own tokens: divergence in needles and texts, paired by question."""
    columns: list[dict[str, tuple[str, str, str]]] = []
    header = ["policy"]
    for title, runs, size in (
        ("unknown", ("needles_unknown", "every_unknown"), QUARTER),
        ("known", ("needles_known", "every_known"), QUARTER),
        ("text", ("text",), "25%"),
    ):
        rows = chain.from_iterable(load(name, run) if title == "text" else answered(load(name, run)) for run in runs)
        together = {(row["policy"], question(row)): row for row in rows if row["budget"] == size}
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in load(name, f"heads_{title}"):
            if row["budget"] == size and (other := together.get((row["policy"], question(row)))):
                one = (late(each, "kl") if title == "text" else each["agreement"]["kl"] for each in (other, row))
                pairs[row["policy"]].append((next(one), next(one)))
        most = max(map(len, pairs.values()), default=0)
        columns.append({policy: _pair(each, most) for policy, each in pairs.items()})
        header += [f"{title}: together", "apart", f"more (n = {most})"]
    policies = sorted({policy for column in columns for policy in column})
    nothing = ("", "", "")
    return table(
        header, [(f"`{each}`", *chain(*(column.get(each, nothing) for column in columns))) for each in policies]
    )


def _pair(pairs: list[tuple[float, float]], most: int) -> tuple[str, str, str]:
    """Both means, and the mean of the differences with its error; how many there are, if not `most`."""
    one, other = (f"{fmean(values):.2f}" for values in zip(*pairs, strict=True))
    count = f" (n = {len(pairs)})" if len(pairs) < most else ""
    return one, other, cell((after - before for before, after in pairs), 2) + count


def overview(name: str, share: str = "25%") -> str:
    """Divergence over all prompts of a suite, and scores in tasks that the model does, at one share of the prompt.

    Over the questions that the default has answered; policies that stand in a quarter of the suites or more.
    """
    suites: dict[str, dict[str, list[Row]]] = {}
    right: dict[str, dict[str, list[Row]]] = {}
    for run, title in SUITES.items():
        rows = load(name, run)
        if not any(row["policy"] == "auto" for row in rows) or "new_tokens" in rows[0]:
            continue
        rows, _ = finished(rows, {("auto", share)})
        groups = {policy: group for (policy, size), group in by_variant(rows).items() if size == share}
        suites[title], good = groups, able(rows)
        if good:
            every = {"full": full(rows), **groups}
            right[title] = {policy: [row for row in group if row["task"] in good] for policy, group in every.items()}
    if not suites:
        return "No rows."
    counts = Counter(chain(*suites.values()))
    far = {policy: [divergence(each[policy]) for each in suites.values() if policy in each] for policy in counts}
    order = sorted((each for each in counts if 4 * counts[each] >= len(suites)), key=lambda each: fmean(far[each]))
    return (
        f"KL divergence from the full cache, nats per token:\n\n{_across(suites, order, apart)}\n\n"
        f"Right, %, in the tasks that the full cache does in 60 % of the cases:\n\n"
        f"{_across(right, ['full', *order], _score)}"
    )


def _across(suites: dict[str, dict[str, list[Row]]], policies: list[str], shown: Callable[[Any], str]) -> str:
    """Suites down, with their prompts; policies across."""
    lines = [
        (title, str(len(groups["auto"])), *(shown(groups[each]) if each in groups else "" for each in policies))
        for title, groups in suites.items()
    ]
    return table(("suite", "n", *(f"`{policy}`" for policy in policies)), lines)


def _score(group: list[Row]) -> str:
    return percent(group) if all(row["score"] in (0, 1) for row in group) else _mean_score(group)
