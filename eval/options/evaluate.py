"""The options of `paged-eviction eval`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from .base import File, Numbers, Options, Words, option, words
from .cache import CacheOptions
from .model import ModelOptions


def whole_number(text: str) -> int | None:
    """A whole number from 1 to a billion; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0 else None


#: Where held tokens can stand.
POSITIONS = ("text", "cache")


def _positions(value: str) -> str:
    positions = words(value)
    if not positions or not set(positions) <= set(POSITIONS):
        raise ValueError("write text or cache; with --text both can run: text,cache")
    return ",".join(positions)


#: One of `POSITIONS`, or both with a comma.
PositionNames = Annotated[Words, AfterValidator(_positions)]


def _batch_size(value: Any) -> Any:
    size = whole_number(str(value))
    if size is None and value != "auto":
        raise ValueError("write a number of prompts, or auto")
    return size or value


def _object(value: Any) -> Any:
    """A JSON object as text, keys in order."""
    try:
        arguments = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise ValueError("""write a JSON object, such as '{"enable_thinking": false}'""")
    if wrong := sorted({"tokenize", "add_generation_prompt", "continue_final_message"} & arguments.keys()):
        raise ValueError(f"{', '.join(wrong)}: leave it out, it says how a prompt ends")
    return json.dumps(arguments, sort_keys=True)


#: Of an object in a file, or of its text.
JsonObject = Annotated[str, BeforeValidator(_object)]


class RunOptions(Options):
    """What runs over tasks and over texts are told."""

    limit: int | None = option(
        None,
        "Samples per task and length: the first ones, always the same. Default 64 for generated tasks, all for "
        "LongBench; with --text: 8 texts.",
        at_least=1,
    )
    dataset: str | None = option(
        None,
        "With --text: a dataset, on the Hub or in a folder, with a column context or text. For tasks of a dataset see "
        "--task-file.",
        metavar="ID",
    )
    dataset_revision: str | None = option(
        None, "Branch, tag or commit of that dataset, or of the records of tasks that are on the Hub.", metavar="REV"
    )
    batch_size: Annotated[int | Literal["auto"], BeforeValidator(_batch_size)] = option(
        "auto",
        "Prompts, or texts, per batch. If memory runs out, the batch is halved.",
        metavar="N|auto",
    )
    agreement: bool = option(
        False,
        "Also compare with the full cache: KL divergence of the next-token distributions, and the share of equal "
        "tokens in answers.",
    )


class TaskFileOptions(Options):
    """What makes a task of a file of records."""

    template: str | None = option(
        None,
        "Template in Jinja that makes the prompt from the fields of a record: '{{ context }}|||Question: {{ question "
        "}}'. The text before ||| is compressed; the text after it is the question.",
        metavar="TEXT|@FILE",
        shown="by the names of the fields",
    )
    metric: str | None = option(
        None,
        "Metric of an answer: qa_f1 counts every word, so that a right answer inside of a sentence scores about a "
        "third; contains is 1 if the right answer is in it. Or another one of this package, or evaluate:NAME of the "
        "evaluate library, where NAME may be the folder of a metric script; evaluate:NAME#KEY if it returns several "
        "numbers.",
        metavar="NAME",
        shown="qa_f1",
    )
    max_new_tokens: int | None = option(
        None,
        "Most tokens of an answer, such as 8192 for models that think before they answer. This deviates from the "
        "task's protocol, and rows and tables say so.",
        at_least=1,
        shown="the task's, 64 of your own",
    )
    answers: str | None = option(None, "The field of the right answers.", metavar="FIELD", shown="answers, answer, ...")


class TaskOptions(TaskFileOptions):
    """What runs over tasks are told besides."""

    seed: int = option(0, "Seed of generated tasks.")
    data_dir: str | None = option(
        None,
        "Where LongBench is: a folder with TASK.jsonl files, or the official data.zip. Without it, the Hub.",
        metavar="PATH",
    )
    question_aware: bool = option(
        True,
        "Compress after the model has read the whole prompt, as the papers do, or before it reads the question, so "
        "that one compressed context serves all questions about it.",
        flags="--question-aware/--question-agnostic",
    )
    max_length: int | None = option(
        None,
        "Longer prompts lose their middle, as LongBench's do; those of generated tasks are not cut. How many are too "
        "long is said before anything is computed.",
        at_least=2,
        shown="the model's context less the answer",
    )
    chat_template: Literal["auto", "always", "never"] = option(
        "auto",
        "auto, always or never. auto: if the task's protocol uses one (few-shot and code tasks do not), see docs.",
        metavar="WHEN",
    )
    chat_template_kwargs: JsonObject | None = option(
        None,
        """More arguments of the chat template, such as '{"enable_thinking": false}'.""",
        metavar="JSON",
    )
    prefill_chunk_size: int | None = option(
        None,
        "Tokens of the prompt per forward: bounds memory; the cache is compressed between chunks.",
        at_least=1,
    )
    share_prefill: bool = option(
        True,
        "Read every prompt once for all policies and budgets. The answers are the same; without it, memory and "
        "prefill time are measured for each.",
        flags="--share-prefill/--no-share-prefill",
    )

    teacher_forced: bool = option(
        False,
        "With --agreement: only the full cache generates. Every other cache reads that answer at once, and its "
        "predictions at each token count as its answer: one forward per cache instead of one per token.",
    )
    stop_when_right: bool = option(
        False,
        "End an answer with the token that makes it right. For base models, which continue and repeat the answer: "
        "with --teacher-forced, a cache would read there what it has evicted. Generated tasks only.",
    )


class TextOptions(Options):
    """What runs over texts are told besides."""

    chunk: int = option(64, "Tokens per forward.", at_least=1)


class EvalOptions(ModelOptions, CacheOptions, RunOptions, TaskOptions, TextOptions):
    """What was typed, or written in a run file."""

    # Both at once, which only a run over texts can be.
    positions: PositionNames = option(
        "text",
        "Positions of held tokens: those of the text, or consecutive ones (cache). With --text both can run: "
        "text,cache.",
        metavar="text|cache",
    )
    files: list[File] | None = option(
        None,
        "With --text: plain texts, or .jsonl with a field context or text.",
        metavar="FILE",
        argument=True,
    )
    config: File | None = option(
        None,
        "Options from a file, one `name: value` per line, with names as here without the dashes and lists as \\[a, b]."
        " Options on the command line take precedence. Every run writes such a file, run.yaml.",
        metavar="FILE.yaml",
    )
    output: File | None = option(
        None,
        "Folder of results. Rows that it already has are not computed again: the same command continues a stopped "
        "run, and a command with more policies, budgets or samples adds to it.",
        shown="results/eval or results/text",
    )
    policies: Words = option(
        # What the paper compares and the simplest there are.
        "paged_eviction,keydiff,key_norm,value_norm,streaming_llm,recency,random",
        "Names from `paged-eviction policies`, with parameters and modifiers: snapkv(window=16), caote(h2o); "
        "h2o@pyramid shares the budget out among layers. full is the full cache, all is every "
        "policy.",
        metavar="A,B,...",
        shown="seven simple ones",
    )
    budgets: Numbers = option(
        "6%,12.5%,25%,50%,full",
        "Budgets: tokens per layer and row (256), a share of the prompt (25%), bytes of keys and values per row in "
        "all paged layers together (2MiB), a share of the bytes that the prompt takes in 16 bits (25% of memory), or "
        "full, once for all policies. Rounded up to whole blocks; bytes are rounded down.",
        metavar="N,P%,SIZE,full",
    )
    tasks: Words = option(
        "suite",
        "Names and groups from `paged-eviction tasks`: suite, ruler, niah; LongBench: paper, en16, all21, e13, v2.",
        metavar="A,B,...",
    )
    haystack: list[File] | None = option(
        None,
        "Texts in which the task niah hides its needle: text files, or a folder of them, such as the essays of Paul "
        "Graham in published tests.",
        metavar="FILE|FOLDER",
        shown="made-up sentences and Python's library",
    )
    task_file: list[File] | None = option(
        None,
        "Your own records: JSON lines (also gzipped), JSON, CSV or Parquet; datasets:ID:CONFIG:SPLIT from the Hub "
        "or a folder. The task has the name of the file. Without --tasks it runs alone.",
        metavar="FILE",
    )
    length: Numbers | None = option(
        None,
        "Tokens per prompt of generated tasks; several lengths run one after the other. With --text: tokens per text,"
        " 2048.",
        metavar="N,...",
        shown="1024",
    )
    log_samples: bool = option(
        False,
        "Also write every prompt as the model reads it, with its ids, to prompts.jsonl.",
    )
    workers: int | None = option(
        None,
        "Processes on this machine, one thread each. Default 2 for the embedded model on a CPU, else 1.",
        at_least=1,
    )
    shard: str | None = option(
        None,
        "Answer only one of N shares of the questions, such as 3/8, for jobs of a cluster. All write to the same "
        "--output; the last one to end shows the tables.",
        metavar="I/N",
    )
    text: bool = option(
        False,
        "Perplexity by position on FILE..., on --dataset or, without either, on standard-library modules that the "
        "embedded model never saw.",
    )
