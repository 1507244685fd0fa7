"""`paged-eviction eval`."""

from __future__ import annotations

from ..caches.spelling import check_spelling
from ..errors import UserError
from ..options.base import flag
from ..options.evaluate import EvalOptions, TaskOptions, TextOptions

#: Options that mean nothing with, or without, --text.
TASKS_ONLY = {"tasks", "task_file", "haystack", "log_samples", *TaskOptions.model_fields}
TEXTS_ONLY = {*TextOptions.model_fields}


def evaluate(options: EvalOptions) -> bool:
    """Run every policy at every budget; print tables of scores; write rows, settings and costs.

    Rows are written as soon as they are finished, so the same command continues a run that was stopped. Rows that the
    folder already has for the same settings, weights and prompts are not computed again; other rows are not touched.

    Examples:
      # Seven simple policies on the embedded model: three minutes, no download
      paged-eviction eval

      # Policies of your choice, questions unknown when the context is compressed
      paged-eviction eval --policies snapkv,h2o@pyramid,full --budgets 256,25% --question-agnostic

      # LongBench as the papers report it: 16 tasks, from the official data.zip
      paged-eviction eval --model meta-llama/Llama-3.1-8B-Instruct --tasks en16 --data-dir data.zip \\
        --policies paged_eviction,keydiff,full --budgets 512,1024 --output results/llama

      # The same over all GPUs of a machine; or the third of a cluster's eight jobs
      accelerate launch -m hf_paged_eviction_eval eval --config results/llama/run.yaml
      paged-eviction eval --config results/llama/run.yaml --shard 3/8

      # Records of your own
      paged-eviction eval --task-file mine.jsonl --metric contains
      paged-eviction eval --task-file my.csv --template '{{ report }}|||{{ question }}' --answers answer

      # How well texts are predicted, also far past the model's window
      paged-eviction eval --text book.txt articles.jsonl --budgets 256,512,full
      paged-eviction eval --text book.txt --length 100000 --policies recency,keydiff --budgets 512 \\
        --positions text,cache
    """
    return run(options)


def run(options: EvalOptions) -> bool:
    """Everything that was asked for; False if rows are missing."""
    check_spelling(options.policies)
    from ..running import requests, terminal

    of_texts = options.text is not None
    names = TASKS_ONLY if of_texts else TEXTS_ONLY
    if wrong := ", ".join(flag(name) for name in options.offered() if name in names & options.model_fields_set):
        hint = "only for tasks; leave it out with --text" if of_texts else "only for texts; add --text"
        raise UserError(f"{wrong}: {hint}")
    return terminal.run(requests.request_of(options))
