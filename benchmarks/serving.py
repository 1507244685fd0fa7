"""Continuous batching with budgets against transformers' own, and what the bookkeeping costs: results/serving.json.

Goals: at least three times the live requests and no preemption where full attention preempts, more tokens per second;
at 16 live requests at most 10 % of a step for bookkeeping.
"""

import torch
from common import save

from hf_paged_eviction_eval.bench.serving import ServingSettings, run_bookkeeping, run_serving


def main() -> None:
    torch.set_num_threads(1)
    settings = ServingSettings()
    bookkeeping = run_bookkeeping(settings)
    serving = run_serving(settings)
    full, *others = serving["runs"].values()
    goals = {
        "live requests while others wait, least ratio to full": min(
            run["live_mean_while_others_wait"] / full["live_mean_while_others_wait"] for run in others
        ),
        "preempted, full": full["preempted"],
        "preempted, most with a budget": max(run["preempted"] for run in others),
        "tokens per second, least ratio to full": min(
            run["tokens_per_second"] / full["tokens_per_second"] for run in others
        ),
        "bookkeeping at 16 requests, share of a step": bookkeeping["by_live_requests"]["16"]["share"],
    }
    save("serving", {"goals": goals, **serving, "bookkeeping": bookkeeping})


if __name__ == "__main__":
    main()
