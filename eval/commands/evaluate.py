"""`paged-eviction eval`."""

from __future__ import annotations

from ..caches.spelling import check_spelling
from ..errors import UserError
from ..options.base import flag
from ..options.evaluate import EvalOptions, TaskOptions, TextOptions

EPILOG = """[bold]Examples[/]

Three minutes on two cores, without a download: seven simple policies on the small model that ships with the package

  paged-eviction eval

Some policies at some budgets, questions unknown when the context is compressed

  paged-eviction eval --policies paged_eviction,streaming_llm,full --budgets 256,25% --question-agnostic

LongBench as the papers report it: 16 tasks, files from the official data.zip

  paged-eviction eval --model meta-llama/Llama-3.1-8B-Instruct --tasks en16 --data-dir data.zip \
--policies paged_eviction,keydiff,full --budgets 512,1024 --output results/llama

The same over all GPUs of a machine; the same command continues a run that was stopped

  accelerate launch -m hf_paged_eviction_eval eval --config results/llama/run.yaml

The third of eight jobs of a cluster, which may run whenever they like

  paged-eviction eval --config results/llama/run.yaml --shard 3/8

A model that one GPU cannot hold

  paged-eviction eval --device-map auto --model ... --tasks paper

Records of your own

  paged-eviction eval --task-file mine.jsonl --metric contains

  paged-eviction eval --task-file my.csv --template '{{ report }}|||{{ question }}' --answers answer --metric qa_f1

How well texts are predicted

  paged-eviction eval --text book.txt articles.jsonl --budgets 256,512,full

Text that streams far past the model's window, held tokens at their places in the text and one after the other

  paged-eviction eval --text book.txt --length 100000 --policies recency,streaming_llm,keydiff --budgets 512 \
--positions text,cache
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder or a name on the Hub",
    "policies": "snapkv(window=16),h2o@pyramid, ..., full, all",
    "budgets": "256 (tokens), 25% (of the prompt), 2MiB, full",
    "tasks": "suite (default), ruler, niah, LongBench's en16, ...",
    "length": "tokens of a generated prompt (1024)",
    "limit": "samples per task (64; all of LongBench)",
    "data_dir": "LongBench's data.zip, or a folder of its files",
    "task_file": "your own: JSON lines, CSV, Parquet, datasets:ID",
    "question_aware": "default; or compress before: --question-agnostic",
    "max_new_tokens": "most tokens of an answer, for models that think",
    "chat_template_kwargs": """such as '{"enable_thinking": false}'""",
    "agreement": "also the KL divergence from the full cache",
    "prefill_chunk_size": "tokens of the prompt per forward: bounds memory",
    "text": "perplexity of texts, instead of tasks",
    "config": "options from a file; every run writes run.yaml",
    "output": "folder of results, completed if there (results/eval)",
}
#: Options that mean nothing with, or without, --text.
TASKS_ONLY = {
    "tasks",
    "task_file",
    "haystack",
    "log_samples",
    *TaskOptions.model_fields,
}
TEXTS_ONLY = {*TextOptions.model_fields}


def evaluate(options: EvalOptions) -> bool:
    """Run every policy at every budget; print tables; write rows, settings, costs and plots.

    Rows are written as soon as they are finished, so the same command continues a run that was stopped. Rows that the
    folder already has for the same settings, weights and prompts are not computed again; other rows are not touched.
    """
    return run(options)


def run(options: EvalOptions) -> bool:
    """Everything that was asked for; False if rows are missing."""
    check_spelling(options.policies)
    from ..running import requests, terminal

    if options.text:
        if wrong := _given(options, TASKS_ONLY):
            raise UserError(f"{wrong}: only for tasks; leave it out with --text")
    elif options.files:
        raise UserError(f"files are read only with --text: paged-eviction eval --text {options.files[0]}")
    elif wrong := _given(options, TEXTS_ONLY):
        raise UserError(f"{wrong}: only for texts; add --text")
    return terminal.run(requests.request_of(options))


def _given(options: EvalOptions, names: set[str]) -> str:
    return ", ".join(flag(name) for name in options.offered() if name in names & options.model_fields_set)
