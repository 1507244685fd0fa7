"""Continuous batching with budgets against transformers' own, and what the bookkeeping costs: results/serving.json.

Goals: at least three times the live requests and no preemption where full attention preempts, more tokens per second;
at 16 live requests at most 10 % of a step for bookkeeping.
"""

from typing import Any

import torch
from common import save

from hf_paged_eviction_eval.bench.serving import ServingSettings, run_bookkeeping, run_serving


def goals(runs: dict[str, dict[str, Any]], bookkeeping: dict[str, Any]) -> dict[str, float]:
    """What is asked for, in numbers. CPU seconds are those of this process: other work on the machine hardly counts."""
    full, *others = runs.values()

    def least(name: str) -> float:
        return round(min(run[name] / full[name] for run in others), 3)

    return {
        "live requests while others wait, least ratio to full": least("live_mean_while_others_wait"),
        "preempted, full": full["preempted"],
        "preempted, most with a budget": max(run["preempted"] for run in others),
        "tokens per second, least ratio to full": least("tokens_per_second"),
        "tokens per CPU second, least ratio to full": least("tokens_per_cpu_second"),
        "bookkeeping at 16 requests, share of a step": bookkeeping["by_live_requests"]["16"]["share"],
    }


def main() -> None:
    torch.set_num_threads(1)
    settings = ServingSettings()
    bookkeeping = run_bookkeeping(settings)
    serving = run_serving(settings)
    save("serving", {"goals": goals(serving["runs"], bookkeeping), **serving, "bookkeeping": bookkeeping})


if __name__ == "__main__":
    main()
