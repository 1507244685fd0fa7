"""What a run has to compute, planned before its model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged_eviction.internals import trained_window

from ..data.prompting.prompts import Batch, longest_context
from ..grouping import grouped
from ..models.loading import load_config, load_tokenizer
from ..options.settings import TaskSettings, TextSettings
from ..store.checks import Key
from ..store.prompt_file import PROMPTS, as_lines
from ..store.results import SUMMARY, Row, write_json, write_whole
from ..tasks.suites import data_notes
from .batches import make_batches, pack
from .facts import task_facts, text_facts
from .meaning import prompt_digest, text_digest
from .perplexity import make_text_jobs, run_texts, text_variants
from .processes.distributed import Team
from .requests import Request
from .runner import run_batch
from .variants import Variant, batch_keys, check_caches, variants

#: Jobs with the keys of their rows.
Share = Sequence[tuple[Any, Sequence[Key]]]


#: Given model, tokenizer, settings, a job and the keys that are there, the rows as they are finished; of rows that
#: take long it tells in between, see `progress.tell`.
RunJob = Callable[[Any, Any, Any, Any, Any], Iterator[list[Row]]]


@dataclass(frozen=True)
class Plan:
    """What a run computes.

    Attributes:
        tokenizer: of its model.
        run: computes the rows of a job.
        jobs: how many there are.
        share: the jobs of one process.
        prompts: the digest of the prompt of each row, in the order of the rows, for all processes.
        variants: policies and budgets.
        highest: of all token ids that the model reads.
        facts: what is written down of the run besides its settings.
        notes: what is told before anything is computed.
        finish: writes the summary into the folder.
    """

    tokenizer: Any
    run: RunJob
    jobs: int
    share: Callable[[Team], Share]
    prompts: Mapping[Key, str]
    variants: Sequence[Variant]
    highest: int
    facts: Mapping[str, Any]
    notes: Sequence[str]
    finish: Callable[[Path, Sequence[Row]], None]


def plan_tasks(request: Request[TaskSettings], team: Team) -> Plan:
    """Every question under every policy and budget."""
    settings = request.settings
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    listed = variants(settings)
    check_caches(config, settings, listed)
    batches = make_batches(settings, tokenizer, config)
    context = longest_context(config, tokenizer)
    for sample in {batch.task: batch.prompts[0].sample for batch in batches}.values():
        sample.score(sample.answers[0])  # so that a package that is missing is missed now
    facts, data = task_facts(settings, batches), data_notes(settings.tasks, settings)
    prompts: dict[Key, str] = {
        variant.key(batch, prompt): digest
        for batch in batches
        for digests in [[prompt_digest(prompt) for prompt in batch.prompts]]
        for variant in listed
        for prompt, digest in zip(batch.prompts, digests, strict=True)
    }

    def finish(folder: Path, rows: Sequence[Row]) -> None:
        write_tasks(folder, rows)
        if request.options.log_samples:
            write_whole(folder / PROMPTS, as_lines(batches, tokenizer))

    return Plan(
        tokenizer,
        run_batch,
        jobs=len(batches),
        share=lambda team: [(batch, batch_keys(settings, batch)) for batch in share_batches(team, batches)],
        prompts=prompts,
        variants=listed,
        highest=max(max(*prompt.context, *prompt.question, 0) for batch in batches for prompt in batch.prompts),
        facts={**facts, **({"data_notes": data} if data else {})},
        notes=[*data.values(), *long_prompts(facts["tasks"], context)],
        finish=finish,
    )


def plan_texts(request: Request[TextSettings], team: Team) -> Plan:
    """Every text under every policy and budget."""
    settings = request.settings
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    listed = text_variants(settings)
    check_caches(config, settings, listed)
    jobs, window = make_text_jobs(settings, tokenizer), trained_window(config)
    every = [(job, job.keys()) for job in jobs]
    texts = {name: ids for job in jobs for name, ids in zip(job.names, job.tokens, strict=True)}
    length = jobs[0].length
    digests = {name: text_digest(ids, length) for name, ids in texts.items()}
    return Plan(
        tokenizer,
        run_texts,
        jobs=len(jobs),
        share=lambda team: team.share(every),
        prompts={key: digests[key.text] for _, keys in every for key in keys},
        variants=listed,
        highest=max(map(max, texts.values())),
        facts={**text_facts(texts), "window": window},
        notes=long_texts(settings, length, window),
        finish=write_texts,
    )


def write_tasks(folder: Path, rows: Sequence[Row]) -> None:
    """What rows over tasks come to."""
    from ..report.frame import long_frame
    from ..report.means import cell_records, cells_of

    write_json(folder / SUMMARY, cell_records(cells_of(long_frame(rows))))


def write_texts(folder: Path, rows: Sequence[Row]) -> None:
    """What rows over texts come to."""
    from ..report.frame import text_frame
    from ..report.means import curve_records, curves

    write_json(folder / SUMMARY, curve_records(curves(text_frame(rows))))


def long_texts(settings: TextSettings, length: int, window: int | None) -> list[str]:
    """A sentence on texts that are longer than the model's window: they stream past it."""
    if window is None or length <= window:
        return []
    beyond = f"a text has {length} tokens, and the model was made for {window}: it streams past them"
    if not settings.policies:
        return [f"{beyond}, where a full cache sees distances that the model never learned"]
    if "cache" in settings.positions.split(","):
        return [f"{beyond}; with positions=cache no distance exceeds the budget, a block and a chunk"]
    return [f"{beyond}, where distances grow with the text; --positions text,cache shows both ways"]


def long_prompts(tasks: dict[str, Any], context: int | None) -> list[str]:
    """A sentence for each task with prompts that lose their middle, or that are longer than the model's context."""
    notes = []
    for task, facts in tasks.items():
        longest = facts["prompt_tokens"]["longest"]
        if facts["truncated"]:
            notes.append(
                f"{facts['truncated']} of {facts['samples']} prompts of {task} are too long and lose their middle; the "
                f"longest has {longest} tokens then (--max-length)"
            )
        if context is not None and longest > context:
            notes.append(
                f"prompts of {task} have up to {longest} tokens, and the model was made for {context}: answers may "
                "be worse than the cache makes them; take shorter ones (--length, --max-length)"
            )
    return notes


def share_batches(team: Team, batches: Sequence[Batch]) -> list[Batch]:
    """The batches of this process: questions about one context stay together, whatever the size of the batches."""
    if team.size == 1:
        return list(batches)
    all_batches = []
    tasks = grouped(batches, lambda batch: (batch.task, batch.length))
    for turn, ((task, length), of_task) in enumerate(tasks.items()):
        prompts = [prompt for batch in of_task for prompt in batch.prompts]
        contexts = list(grouped(prompts, lambda prompt: prompt.context).values())
        mine = [prompt for same in team.share(contexts, turn) for prompt in same]
        most = max(len(batch.prompts) for batch in of_task)
        all_batches += [Batch(task, length, rows) for rows in pack(mine, most)]
    return all_batches
