"""What a run found, in a sentence out of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..budgets import FULL
from ..summaries.summary import curves
from .leaderboard import standings
from .runs import Run, Variant

#: Percent of the full cache's score that count as having kept it, and percent of perplexity that may be added.
KEPT, ADDED = 95.0, 5.0


def headlines(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Sentences under the label of their run."""
    return [(run.label, sentence) for run in runs for sentence in (_scores(run), _texts(run)) if sentence]


def _scores(run: Run) -> str:
    found = standings(run)
    kept = {variant: float(one.kept) for variant, one in found.items() if one.kept is not None}
    if not kept:
        return _without_full({variant: float(one.mean) for variant, one in found.items() if variant[0] != FULL})
    budgets = list(dict.fromkeys(budget for _, budget in kept))
    best = {budget: max(value for (_, other), value in kept.items() if other == budget) for budget in budgets}
    enough = next((budget for budget in budgets if best[budget] >= KEPT), None)
    budget = enough or max(budgets, key=lambda one: best[one])
    here = {policy: value for (policy, other), value in kept.items() if other == budget}
    top = [policy for policy, value in here.items() if round(value) == round(best[budget])]
    spread = found[top[0], budget].kept
    error = f" (± {spread.error:.0f})" if spread is not None and spread.error >= 0.5 else ""
    verb = "keeps" if len(top) == 1 else "keep"
    sentence = f"{_names(top)} {verb} {best[budget]:.0f} %{error} of the full cache's score at {_budget(budget)}"
    if enough is None:
        sentence = f"No policy keeps {KEPT:.0f} % of the full cache's score: {sentence}, the best of all"
    worst = min(here, key=lambda policy: here[policy])
    if worst not in top:
        sentence += f"; {worst}, the last of {len(here)}, {here[worst]:.0f} %"
    if budget != budgets[0]:
        policy = max((name for name, other in kept if other == budgets[0]), key=lambda name: kept[name, budgets[0]])
        sentence += f". At {_budget(budgets[0])} the best, {policy}, keeps {best[budgets[0]]:.0f} %"
    return f"{sentence}."


def _without_full(means: Mapping[Variant, float]) -> str:
    if not means:
        return ""
    policy, budget = max(means, key=lambda variant: means[variant])
    score = means[policy, budget]
    return f"{policy} at {_budget(budget)} has the highest mean score, {score:.1f} %; no full cache ran beside it."


def _texts(run: Run) -> str:
    found = {(curve.policy, curve.budget): curve for curve in curves(run.texts)}
    full = next((curve for (policy, _), curve in found.items() if policy == FULL), None)
    others = sorted((curve for curve in found.values() if curve.policy != FULL), key=lambda it: it.tokens or 0)
    if full is None or not others:
        return ""
    more = {(it.policy, it.budget): 100 * (it.perplexity / full.perplexity - 1) for it in others}
    smallest = next((budget for (_, budget), value in more.items() if value <= ADDED), None)
    here = {key: value for key, value in more.items() if smallest is None or key[1] == smallest}
    policy, budget = min(here, key=lambda key: here[key])
    value = here[policy, budget]
    change = f"{abs(value):.1f} % {'more' if value >= 0 else 'less'} perplexity than the full cache"
    return f"{policy} reads the texts with {change} at {_budget(budget)}."


def _names(policies: Sequence[str]) -> str:
    shown = [*policies[:3], *([f"{len(policies) - 3} more"] if len(policies) > 3 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _budget(budget: str) -> str:
    if budget.endswith("%"):
        return f"a budget of {budget[:-1]} %"
    return f"a budget of {budget} tokens" if budget.isdecimal() else f"a budget of {budget}"
