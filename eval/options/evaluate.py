"""The options of `paged-eviction eval`."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from .base import File, Numbers, Options, Words, option
from .cache import CacheOptions
from .model import ModelOptions

#: Where held tokens can stand; over texts perhaps both in one run.
Positions = Literal["text", "cache", "text,cache"]


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

    title: ClassVar[str] = "run"

    limit: int | None = option(
        None, "Samples per task and length: the first ones.", at_least=1, shown="64; all of LongBench; 8 texts"
    )
    batch_size: int | None = option(
        None, "Prompts, or texts, per batch; halved if memory runs out.", at_least=1, shown="as many as fit"
    )
    agreement: bool = option(False, "Also compare with the full cache: KL divergence, equal tokens in answers.")
    dataset: str | None = option(None, "With --text: a dataset with a column context or text.", metavar="ID")
    dataset_revision: str | None = option(None, "Revision of it, or of tasks' records on the Hub.", metavar="REV")


class TaskFileOptions(Options):
    """What makes a task of a file of records."""

    title: ClassVar[str] = "records of your own (--task-file)"

    template: str | None = option(
        None,
        "The prompt in Jinja, of the fields of a record: '{{ context }}|||Question: {{ question }}'. What stands "
        "before ||| is compressed.",
        metavar="TEXT|@FILE",
        shown="by the names of the fields",
    )
    metric: str | None = option(
        None,
        "qa_f1 counts every word, contains is 1 if the right answer is in it; or evaluate:NAME of the evaluate "
        "library, evaluate:NAME#KEY if it returns several numbers; or another one of this package.",
        metavar="NAME",
        shown="qa_f1",
    )
    max_new_tokens: int | None = option(
        None,
        "Most tokens of an answer, such as 8192 for models that think. Rows and tables say so.",
        at_least=1,
        shown="the task's, 64 of your own",
    )
    answers: str | None = option(None, "The field of the right answers.", metavar="FIELD", shown="answers, answer, ...")


class TaskOptions(TaskFileOptions):
    """What runs over tasks are told besides."""

    title: ClassVar[str] = "tasks"

    seed: int = option(0, "Seed of generated tasks.")
    data_dir: str | None = option(
        None, "LongBench's data.zip, or a folder with its TASK.jsonl files.", metavar="PATH", shown="the Hub"
    )
    question_aware: bool = option(
        True,
        "Compress after the question was read, as the papers do, or before, for any question.",
        off="--question-agnostic",
    )
    max_length: int | None = option(
        None,
        "Longer prompts lose their middle, as LongBench's do; generated ones are not cut.",
        at_least=2,
        shown="the model's context less the answer",
    )
    chat_template: Literal["auto", "always", "never"] = option(
        "auto", "auto: if the task's protocol uses one; few-shot and code tasks do not."
    )
    chat_template_kwargs: JsonObject | None = option(
        None, """More arguments of the chat template, such as '{"enable_thinking": false}'.""", metavar="JSON"
    )
    prefill_chunk_size: int | None = option(
        None, "Most tokens of the prompt per forward, compressed after each: bounds memory.", at_least=1
    )
    share_prefill: bool = option(
        True,
        "Read every prompt once for all policies and budgets; or measure memory and prefill time of each.",
        off="--no-share-prefill",
    )
    teacher_forced: bool = option(
        False,
        "With --agreement: only the full cache generates; the others read its answer at once, and their predictions "
        "at each token count as their answers.",
    )
    stop_when_right: bool = option(
        False, "Generated tasks: end an answer with the token that makes it right; base models repeat it."
    )


class TextOptions(Options):
    """What runs over texts are told besides."""

    title: ClassVar[str] = "texts (--text)"

    chunk: int = option(64, "Tokens per forward.", at_least=1)


class EvalOptions(ModelOptions, CacheOptions, RunOptions, TaskOptions, TextOptions):
    """What was typed, or written in a run file."""

    first: ClassVar[tuple[str, ...]] = tuple(
        "model policies budgets tasks length limit task_file text question_aware config output".split()
    )

    # Both at once, which only a run over texts can be.
    positions: Positions = option(
        "text", "Of held tokens: those of the text, or consecutive ones (cache); with --text also text,cache."
    )
    config: File | None = option(
        None,
        "Options from a file, one `name: value` per line, lists as [a, b]; typed ones win. Runs write run.yaml.",
        metavar="FILE.yaml",
    )
    output: File | None = option(
        None,
        "Folder of results. The same command continues a stopped run; one with more policies or budgets adds to it.",
        shown="results/eval or results/text",
    )
    policies: Words = option(
        # What the paper compares and the simplest there are.
        "paged_eviction,keydiff,key_norm,value_norm,streaming_llm,recency,random",
        "Names from `paged-eviction policies`, with parameters, modifiers and allocators: snapkv(window=16), "
        "caote(h2o), h2o@pyramid; full is the full cache, all is every policy.",
        metavar="A,B,...",
        shown="seven simple ones",
    )
    budgets: Numbers = option(
        "6%,12.5%,25%,50%,full",
        "Tokens per layer and row (256); a share of the prompt (25%); bytes per row in all paged layers together "
        "(2MiB); a share of the bytes of the prompt in 16 bits (25% of memory); or full.",
        metavar="N,P%,SIZE,full",
    )
    tasks: Words = option(
        "suite",
        "Names and groups from `paged-eviction tasks`: suite, ruler, niah; LongBench: paper, en16, all21, e13, v2.",
        metavar="A,B,...",
    )
    haystack: list[File] | None = option(
        None, "Texts that hide the needle of the task niah: files, or a folder.", shown="made-up and Python's library"
    )
    task_file: list[File] | None = option(
        None,
        "Your own records: JSON lines, JSON, CSV, Parquet, or datasets:ID:CONFIG:SPLIT, a name on the Hub or a folder. "
        "The task has the name of the file. Without --tasks it runs alone.",
    )
    length: Numbers | None = option(
        None, "Tokens per prompt of generated tasks, or per text.", metavar="N,...", shown="1024, or 2048 per text"
    )
    log_samples: bool = option(False, "Also write every prompt as the model reads it, with its ids, to prompts.jsonl.")
    workers: int | None = option(
        None, "Processes on this machine, one thread each.", at_least=1, shown="1; 2 for the embedded model on a CPU"
    )
    shard: str | None = option(
        None,
        "One of N shares of the questions, such as 3/8, for jobs of a cluster that write to the same --output.",
        metavar="I/N",
    )
    text: list[File] | None = option(
        None,
        "Perplexity, instead of tasks, on plain texts, or .jsonl with a field context or text; on --dataset; or, "
        "without either, on modules of Python that the embedded model never saw.",
        nargs="*",
    )
