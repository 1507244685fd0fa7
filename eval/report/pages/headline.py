"""What a run found, in a sentence out of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, inf

from ...caches.budgets import FULL
from ...tables.means import Mean
from ..leaderboard import standings
from ..runs import Run, Variant

#: Percent of the full cache's score that count as having kept it, and percent of perplexity that may be added.
KEPT, ADDED = 95.0, 5.0


def headlines(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Sentences under the label of their run."""
    return [(run.label, sentence) for run in runs for sentence in (_scores(run), _texts(run)) if sentence]


def _scores(run: Run) -> str:
    """What the best policies keep at the smallest budget that keeps enough, or at the best one."""
    if not run.rows:
        return ""
    lines = standings(run).droplevel("run")
    shares: dict[Variant, Mean] = {line: share for line, share in lines["kept"].items() if isinstance(share, Mean)}
    if shares:
        enough = [budget for (budget, _), share in shares.items() if share.value >= KEPT]
        best = enough[0] if enough else max(shares, key=lambda line: shares[line].value)[0]
        more = "" if enough else f": no policy keeps {KEPT:.0f} % of it"
        return f"{_first(shares, best, 'keep')} of the full cache's score at {_budget(best)}{more}."
    means: dict[Variant, Mean] = {line: mean for line, mean in lines["mean"].items() if line[1] != FULL}
    full = next((mean for (_, policy), mean in lines["mean"].items() if policy == FULL), None)
    if full is not None:
        error = "" if full.error is None else f" ± {full.error:.1f}"
        return (
            f"The full cache itself scores {full.value:.1f}{error} %: too near to nothing to judge "
            "a policy by these questions on this model. Take easier tasks, more of them (--limit), or another model."
        )
    if not means:
        return ""
    best = max(means, key=lambda line: means[line].value)[0]
    return f"{_first(means, best, 'reach')} at {_budget(best)}, the highest mean score; no full cache ran beside it."


def _first(numbers: Mapping[Variant, Mean], budget: str, verb: str) -> str:
    """The best policies at a budget with their number: all that are not seen to be worse than the first."""
    ranked = [(policy, mean) for (at, policy), mean in numbers.items() if at == budget]
    ranked.sort(key=lambda line: -line[1].value)
    best = ranked[0][1]
    tied = [(policy, mean) for policy, mean in ranked if best.value - mean.value <= _unseen(best, mean)]
    names = [policy for policy, _ in tied[:3]] + ([f"{len(tied) - 3} more"] if len(tied) > 3 else [])
    last, error = f"{tied[-1][1].value:.0f}", f" (± {best.error:.0f})" if (best.error or 0) >= 0.5 else ""
    number = (f"{best.value:.0f}" if last == f"{best.value:.0f}" else f"{last} to {best.value:.0f}") + f" %{error}"
    if len(names) == 1:
        return f"{names[0]} {verb}{'es' if verb == 'reach' else 's'} {number}"
    return f"{', '.join(names[:-1])} and {names[-1]} (no difference seen between them) {verb} {number}"


def _unseen(one: Mean, other: Mean) -> float:
    """The largest difference that may be chance: two standard errors, or 1 in 200."""
    if one.error is None or other.error is None:
        return inf
    return max(2 * hypot(one.error, other.error), 0.5)


def _texts(run: Run) -> str:
    """What the best policy adds to the perplexity at the smallest budget at which it is little."""
    curves = {(one.budget, one.policy): one for one in run.curves.sort_values("tokens").itertuples()}
    full = next((one.perplexity.value for (_, policy), one in curves.items() if policy == FULL), None)
    more = {line: 100 * (one.perplexity.value / full - 1) for line, one in curves.items() if full and line[1] != FULL}
    if not more:
        return ""
    smallest = next((budget for (budget, _), value in more.items() if value <= ADDED), None)
    budget, policy = min((line for line in more if smallest in (None, line[0])), key=lambda line: more[line])
    value = more[budget, policy]
    change = f"{abs(value):.1f} % {'more' if value >= 0 else 'less'} perplexity than the full cache"
    return f"{policy} reads the texts with {change} at {_budget(budget)}."


def _budget(budget: str) -> str:
    return f"a budget of {budget} tokens" if budget.isdecimal() else f"a budget of {budget.replace('%', ' %')}"
