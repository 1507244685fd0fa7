"""The options of `paged-eviction eval`: what the command line and a run file may say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from .config import use_run_file

MODEL, COMPARE, TASKS = "Model", "What is compared", "Tasks and data"
PROMPTS, SPEED, MEASURES = "Prompts", "Memory and speed", "What is measured"
TEXTS, RUN = "Perplexity instead of tasks", "The run"


class Heads(str, Enum):
    """Who decides what is evicted."""

    shared = "shared"
    separate = "separate"


class Dtype(str, Enum):
    """Precision of the model."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


#: Options that mean the same in several commands.
Revision = Annotated[
    str | None, typer.Option(rich_help_panel=MODEL, help="Branch, tag or commit of the model on the Hub.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        rich_help_panel=MODEL,
        help="Run the Python files that a model or tokenizer brings. They may do whatever you may: read them first.",
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        rich_help_panel=MODEL,
        help="Also read weights that are not safetensors (.bin), as far as torch.load does with weights_only.",
    ),
]
TokenizerName = Annotated[str | None, typer.Option(rich_help_panel=MODEL, help="If it is not the model's own.")]
Precision = Annotated[Dtype, typer.Option(rich_help_panel=MODEL, help="auto: float32 on a CPU, else the checkpoint's.")]
DeviceName = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODEL,
        help="cpu, cuda, cuda:1, ... The accelerator if there is one; the CPU for the embedded model.",
    ),
]


class DeviceMap(str, Enum):
    """How one process splits a model."""

    auto = "auto"


class ChatTemplate(str, Enum):
    """Which prompts are wrapped."""

    auto = "auto"
    always = "always"
    never = "never"


class EditSimilarity(str, Enum):
    """Backend of the metric of code tasks."""

    difflib = "difflib"
    rapidfuzz = "rapidfuzz"


class Rouge(str, Enum):
    """Backend of the metric of summaries."""

    official = "official"
    rouge_score = "rouge_score"


@dataclass(frozen=True)
class Options:
    """What was typed, or written in a run file. None: the default, or what a preset says."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="With --text: plain texts, or .jsonl with a field context or text."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            callback=use_run_file,
            is_eager=True,
            rich_help_panel=RUN,
            help="Options from a file, `name: value` in each line, names as here without the dashes, lists as "
            "\\[a, b]. What is also on the command line counts instead. Every run writes such a file, run.yaml.",
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            help="paper: the setup of PagedEviction (three Llama models, each in a folder of its own; 5 tasks, budgets "
            "256 to 4096). thorough: the built-in suite at 3 lengths. Other options replace parts of it.",
        ),
    ] = None

    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="A folder or a name on the Hugging Face Hub; embedded is the small model that ships with the package.",
            show_default="embedded",
        ),
    ] = None
    revision: Revision = None
    tokenizer: TokenizerName = None
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    dtype: Precision = Dtype.auto
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MODEL,
            help="sdpa, eager, flash_attention_2, ... If not given: paged_eviction (sdpa that shows the queries) where "
            "a policy needs it, else the model's default; recorded.",
        ),
    ] = None
    device: DeviceName = None
    device_map: Annotated[
        DeviceMap | None, typer.Option(rich_help_panel=MODEL, help="auto: layers split over all devices, one process.")
    ] = None
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            rich_help_panel=MODEL,
            help="Every layer split over the processes of torchrun. Without it, the processes of a launcher share out "
            "the samples (data parallel).",
        ),
    ] = False

    policies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            rich_help_panel=COMPARE,
            help="Names from `paged-eviction policies`, with parameters and modifiers: snapkv(window=16), caote(h2o); "
            "h2o@pyramid shares the budget out among layers. full is the full cache, oracle evicts what the full "
            "cache's answer attends to least, all is every policy.",
            show_default="seven simple ones",
        ),
    ] = None
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="N,P%,full",
            rich_help_panel=COMPARE,
            help="Tokens held per layer and row: a number, a share of the prompt, or full (once, for all policies). "
            "Rounded up to whole blocks.",
            show_default="6%,12.5%,25%,50%,full",
        ),
    ] = None
    block_size: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=COMPARE, help="Tokens per block.", show_default="16")
    ] = None
    heads: Annotated[
        Heads, typer.Option(rich_help_panel=COMPARE, help="One decision for all KV heads of a layer, or one for each.")
    ] = Heads.shared

    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            rich_help_panel=TASKS,
            help="Names and groups from `paged-eviction tasks`: suite, ruler, niah, longeval; LongBench: paper, en16, "
            "all21, e13, v2.",
            show_default="suite",
        ),
    ] = None
    length: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=TASKS,
            help="Tokens per prompt of generated tasks, several run one after the other; with --text: per text, 2048.",
            show_default="1024",
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=TASKS,
            help="Samples per task and length: the first ones, always the same. Default 64 for generated tasks, all "
            "for LongBench; with --text: 8 texts.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(rich_help_panel=TASKS, help="Which questions are drawn, of generated tasks.")] = 0
    data_dir: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=TASKS,
            help="LongBench from here: a folder with TASK.jsonl files, or the official data.zip. Else from the Hub.",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            rich_help_panel=TASKS,
            help="Another dataset on the Hub with LongBench's columns; with --text: one with a column context or text.",
        ),
    ] = None
    dataset_revision: Annotated[
        str | None,
        typer.Option(metavar="REV", rich_help_panel=TASKS, help="Branch, tag or commit of the dataset."),
    ] = None

    question_aware: Annotated[
        bool,
        typer.Option(
            "--question-aware/--question-agnostic",
            rich_help_panel=PROMPTS,
            help="Compress after the model has read the whole prompt, as the papers do, or before the question: the "
            "compressed context then serves all questions about it.",
        ),
    ] = True
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            rich_help_panel=PROMPTS,
            help="Longer prompts of LongBench lose their middle.",
            show_default="the model's context less the answer",
        ),
    ] = None
    chat_template: Annotated[
        ChatTemplate,
        typer.Option(rich_help_panel=PROMPTS, help="auto: as LongBench does, not for few-shot and code tasks."),
    ] = ChatTemplate.auto

    batch_size: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            rich_help_panel=SPEED,
            help="Prompts, or texts, that run together. Where memory runs out a batch is halved.",
        ),
    ] = "auto"
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=SPEED,
            help="Tokens of the prompt per forward: bounds memory; the cache is compressed between chunks.",
        ),
    ] = None
    share_prefill: Annotated[
        bool,
        typer.Option(
            "--share-prefill/--no-share-prefill",
            rich_help_panel=SPEED,
            help="Read every prompt once for all policies and budgets. Same answers; without it, memory and prefill "
            "time are measured for each.",
        ),
    ] = True
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=SPEED,
            help="Processes on this machine, one thread each. Default 2 for the embedded model on a CPU, else 1.",
        ),
    ] = None

    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            rich_help_panel=MEASURES,
            help="Also compare with the full cache: share of equal tokens, KL of the next-token distributions.",
        ),
    ] = False
    edit_similarity: Annotated[
        EditSimilarity, typer.Option(rich_help_panel=MEASURES, help="Of code tasks; difflib is official.")
    ] = EditSimilarity.difflib
    rouge: Annotated[Rouge, typer.Option(rich_help_panel=MEASURES, help="Of summaries.")] = Rouge.official

    text: Annotated[
        bool,
        typer.Option(
            "--text",
            rich_help_panel=TEXTS,
            help="Perplexity by position on FILE..., on --dataset or, without either, on standard-library modules "
            "that the embedded model never saw.",
        ),
    ] = False
    chunk: Annotated[int, typer.Option(min=1, rich_help_panel=TEXTS, help="Tokens per forward.")] = 64

    output: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RUN,
            help="Folder of results. A run that was stopped, however, is continued by the same command.",
            show_default="results/eval or results/text",
        ),
    ] = None


def option_hints() -> dict[str, Any]:
    """The types of all options by the name of the field, with what typer reads from them."""
    hints = get_type_hints(Options, include_extras=True)
    return {each.name: hints[each.name] for each in fields(Options)}


def changed(options: Options, names: frozenset[str]) -> list[str]:
    """Those of these options that do not have their default value, as typed."""
    defaults = Options()
    return [
        "--" + each.name.replace("_", "-")
        for each in fields(Options)
        if each.name in names and getattr(options, each.name) != getattr(defaults, each.name)
    ]
