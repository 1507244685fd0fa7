"""What a run found, in a sentence out of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, inf
from typing import Any

from hf_paged_eviction.naming.sizes import readable_bytes

from ...caches.budgets import FULL
from ...tables.means import Mean
from ..leaderboard import standings
from ..runs import Run, Variant

#: Percent of the full cache's score that count as having kept it, and percent of perplexity that may be added.
KEPT, ADDED = 95.0, 5.0


def headlines(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Sentences under the label of their run."""
    answered = [run for run in runs if run.rows]
    lines = standings(*answered).to_dict("index") if answered else {}
    return [(run.label, sentence) for run in runs for sentence in (_scores(run, lines), _texts(run)) if sentence]


def _scores(run: Run, lines: Mapping[tuple[str, str, str], dict[str, Any]]) -> str:
    scores = {(policy, budget): one for (label, budget, policy), one in lines.items() if label == run.label}
    full = next((one["mean"] for (policy, _), one in scores.items() if policy == FULL), None)
    score_shares = {variant: one["kept"] for variant, one in scores.items() if isinstance(one["kept"], Mean)}
    if not score_shares:
        means = {variant: one["mean"] for variant, one in scores.items() if variant[0] != FULL}
        return _without_share(scores, means, full)
    budgets = list(dict.fromkeys(budget for _, budget in score_shares))
    best = {budget: _of(score_shares, budget)[0][1].value for budget in budgets}
    enough = next((budget for budget in budgets if best[budget] >= KEPT), None)
    budget = enough or max(budgets, key=lambda one: best[one])
    here = _of(score_shares, budget)
    sentence = _first(here, "keeps", "keep", " of the full cache's score", _at(scores, budget))
    if enough is None:
        sentence = f"No policy keeps {KEPT:.0f} % of the full cache's score: {sentence}, the best of all"
    worst, value = here[-1]
    if worst not in _tied(here):
        sentence += f"; {worst}, the last of {len(here)}, {value.value:.0f} %"
    if budget != budgets[0]:
        smallest = _of(score_shares, budgets[0])
        sentence += f". At {_at(scores, budgets[0])} the best, {_names(_tied(smallest))}, "
        sentence += f"{'keep' if len(_tied(smallest)) > 1 else 'keeps'} {_percent(smallest)}"
    if all(one["mean"].held for (policy, other), one in scores.items() if other == budget and policy != FULL):
        sentence += f". Nothing was evicted at {_budget(budget)}: it holds all of it"
    return f"{sentence}."


Ranked = Sequence[tuple[str, Mean]]


def _of(numbers: Mapping[Variant, Mean], budget: str) -> Ranked:
    """Policies at a budget, the best first."""
    return sorted(((name, value) for (name, at), value in numbers.items() if at == budget), key=lambda it: -it[1].value)


def _tied(ranked: Ranked) -> list[str]:
    """The best, and those that are not seen to be worse: by at most two standard errors, or by less than 1 in 200."""
    best = ranked[0][1]
    return [name for name, value in ranked if best.value - value.value <= _unseen(best, value)]


def _unseen(one: Mean, other: Mean) -> float:
    """The largest difference that may be chance."""
    if one.error is None or other.error is None:
        return inf
    return max(2 * hypot(one.error, other.error), 0.5)


def _percent(ranked: Ranked) -> str:
    """The number of the best, or of the first to the last that tie with it."""
    best, last = ranked[0][1], ranked[len(_tied(ranked)) - 1][1]
    one, other = f"{best.value:.0f}", f"{last.value:.0f}"
    numbers = one if one == other else f"{other} to {one}"
    return f"{numbers} %" + (f" (± {best.error:.0f})" if (best.error or 0) >= 0.5 else "")


def _first(ranked: Ranked, one: str, many: str, of: str, at: str) -> str:
    names = _tied(ranked)
    sentence = f"{_names(names)} {many if len(names) > 1 else one} {_percent(ranked)}{of} at {at}"
    return sentence + (", no difference seen between them" if len(names) > 1 else "")


def _at(scores: Mapping[Variant, dict[str, Any]], budget: str) -> str:
    """The budget in tokens, and the bytes that a row holds at it."""
    here = [one for (_, other), one in scores.items() if other == budget]
    tokens = max((one["tokens"] for one in here if one["tokens"]), default=None)
    sizes = [one["bytes"] for one in here if one["bytes"] > 0]
    more = [f"{tokens:,} tokens"] if tokens and not budget.isdecimal() else []
    more += [f"{readable_bytes(round(max(sizes)))} a row"] if sizes else []
    return _budget(budget) + (f" ({', '.join(more)})" if more else "")


def _without_share(scores: Mapping[Variant, dict[str, Any]], means: Mapping[Variant, Mean], full: Mean | None) -> str:
    """What can be said where there is no full cache, or where it knows too little itself."""
    if full is not None:
        error = "" if full.error is None else f" ± {full.error:.1f}"
        return (
            f"The full cache itself scores {full.value:.1f}{error} %: too near to nothing to judge "
            "a policy by these questions on this model. Take easier tasks, more of them (--limit), or another model."
        )
    if not means:
        return ""
    budget = max(means, key=lambda variant: means[variant].value)[1]
    sentence = _first(_of(means, budget), "has", "have", " as the highest mean score", _at(scores, budget))
    return f"{sentence}; no full cache ran beside it."


def _texts(run: Run) -> str:
    text_curves = {(one.policy, one.budget): one for one in run.curves.itertuples()}
    full = next((one.perplexity.value for (policy, _), one in text_curves.items() if policy == FULL), None)
    others = sorted((one for one in text_curves.values() if one.policy != FULL), key=lambda it: it.tokens or 0)
    if full is None or not others:
        return ""
    more = {(it.policy, it.budget): 100 * (it.perplexity.value / full - 1) for it in others}
    smallest = next((budget for (_, budget), value in more.items() if value <= ADDED), None)
    here = {key: value for key, value in more.items() if smallest is None or key[1] == smallest}
    policy, budget = min(here, key=lambda key: here[key])
    value = here[policy, budget]
    change = f"{abs(value):.1f} % {'more' if value >= 0 else 'less'} perplexity than the full cache"
    held = " Nothing was evicted: it holds all of it." if text_curves[policy, budget].perplexity.held else ""
    return f"{policy} reads the texts with {change} at {_budget(budget)}.{held}"


def _names(policies: Sequence[str]) -> str:
    shown = [*policies[:3], *([f"{len(policies) - 3} more"] if len(policies) > 3 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _budget(budget: str) -> str:
    if budget.endswith("%"):
        return f"a budget of {budget[:-1]} %"
    return f"a budget of {budget} tokens" if budget.isdecimal() else f"a budget of {budget}"
