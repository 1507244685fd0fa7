"""A whole run: rows are computed, then everything is summarised and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hf_paged_eviction.integration.window import trained_window

from ..data.prompting.prompts import Batch, longest_context, make_batches, pack, refuse_long
from ..data.prompting.suites import data_notes
from ..errors import UserError
from ..models.loading import load_config, load_tokenizer
from ..options.settings import Settings, TaskSettings, TextSettings
from ..store.completion import Outcome, Watch, Work, complete
from ..store.facts import task_facts, text_facts
from ..store.grouping import grouped
from ..store.growth import beyond, grown
from ..store.prompt_file import PROMPTS, as_lines
from ..store.results import SUMMARY, ResultFolder
from ..store.summaries.plot import accuracy_by_task, mean_accuracy, perplexity_by_position
from ..store.summaries.plot_style import save
from ..store.summaries.summary import Cell, Curve, curves, summarise
from .perplexity import make_text_jobs, run_texts, text_row_key, text_variants
from .processes.distributed import Team, join
from .runner import batch_keys, row_key, run_batch
from .variants import check_caches, variants

S = TypeVar("S", bound=Settings)


def evaluate_tasks(
    settings: TaskSettings,
    output: Path,
    workers: int | None,
    watch: Watch,
    say: Callable[[str], None] = lambda text: None,
    log_samples: bool = False,
    shard: str | None = None,
) -> tuple[Outcome, list[Cell]] | None:
    """Answer every question under every policy and budget.

    Args:
        settings: what is asked.
        output: folder of results; a run with the same settings is continued.
        workers: processes that this one starts; None chooses.
        watch: told of progress.
        say: told, before anything is computed, which prompts are too long for the model.
        log_samples: write every prompt as the model reads it, see `store.prompt_file`.
        shard: which of the questions are this process's, see `distributed.join`.

    Returns:
        None in all processes of a launched run but the main one.
    """
    team, settings, earlier = _gather(settings, output, shard, say)
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    check_caches(config, settings, variants(settings))
    batches = make_batches(settings, tokenizer, config)
    if settings.over_long == "refuse":
        refuse_long(batches, longest_context(config, tokenizer))
    batches = team.same(batches)
    jobs = [(batch, batch_keys(settings, batch)) for batch in share_batches(team, batches)]
    keys = [key for batch in batches for key in batch_keys(settings, batch)]
    facts, notes = task_facts(settings, batches), data_notes(settings.tasks, settings)
    facts = {**facts, **({"data_notes": notes} if notes else {})}
    for note in notes.values():
        say(note)
    for note in long_prompts(facts["tasks"], longest_context(config, tokenizer)):
        say(note)
    known = task_facts(earlier, make_batches(earlier, tokenizer, config)) if earlier else facts
    work = Work(settings, output, run_batch, row_key, jobs, keys, facts, known, earlier)
    outcome = complete(team, work, workers, watch)
    if outcome is None:
        return None
    if outcome.others:
        return outcome, []
    cells = summarise(outcome.rows)
    outcome.folder.write_json(SUMMARY, [asdict(cell) for cell in cells])
    if log_samples:
        outcome.folder.write_text(PROMPTS, as_lines(batches, tokenizer))
    if cells:
        save(mean_accuracy(cells), output / "accuracy.png")
        save(accuracy_by_task(cells), output / "accuracy_by_task.png")
    return outcome, cells


def evaluate_texts(
    settings: TextSettings,
    output: Path,
    workers: int | None,
    watch: Watch,
    say: Callable[[str], None] = lambda text: None,
    shard: str | None = None,
) -> tuple[Outcome, list[Curve]] | None:
    """Predict every text under every policy and budget; arguments and result as of `evaluate_tasks`."""
    team, settings, earlier = _gather(settings, output, shard, say)
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    check_caches(config, settings, text_variants(settings))
    found = make_text_jobs(settings, tokenizer)
    jobs = [(job, job.keys()) for job in found]
    there = make_text_jobs(earlier, tokenizer) if earlier else found
    if there[0].length != found[0].length:
        raise UserError(
            f"the longest text would have {found[0].length} tokens, and shares in {output} are of "
            f"{there[0].length}: choose another --output"
        )
    window = trained_window(config)
    for note in long_texts(settings, found[0].length, window):
        say(note)
    facts = {**text_facts(found), "window": window}
    every = [key for _, keys in jobs for key in keys]
    work = Work(settings, output, run_texts, text_row_key, team.share(jobs), every, facts, text_facts(there), earlier)
    outcome = complete(team, work, workers, watch)
    if outcome is None:
        return None
    if outcome.others:
        return outcome, []
    summary = curves(outcome.rows)
    outcome.folder.write_json(SUMMARY, [asdict(curve) for curve in summary])
    if summary:
        save(perplexity_by_position(summary, found[0].length, window), output / "perplexity.png")
    return outcome, summary


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


def _gather(settings: S, output: Path, shard: str | None, say: Callable[[str], None]) -> tuple[Team, S, S | None]:
    """Meet the other processes; the settings with what the folder has already, and those that it had.

    A folder of other settings is refused before anything is loaded.
    """
    found, earlier = grown(settings, output)
    ResultFolder(output, found.as_json(), row_key, earlier.as_json() if earlier else None).check()
    if note := beyond(settings, found):
        say(note)
    return join(found, shard), found, earlier


def share_batches(team: Team, batches: Sequence[Batch]) -> list[Batch]:
    """The batches of this process: questions about one context stay together, whatever the size of the batches."""
    if team.size == 1 or not team.split:
        return list(batches)
    found = []
    tasks = grouped(batches, lambda batch: (batch.task, batch.length))
    for turn, ((task, length), of_task) in enumerate(tasks.items()):
        prompts = [prompt for batch in of_task for prompt in batch.prompts]
        contexts = list(grouped(prompts, lambda prompt: prompt.context).values())
        mine = [prompt for same in team.share(contexts, turn) for prompt in same]
        most = max(len(batch.prompts) for batch in of_task)
        found += [Batch(task, length, rows) for rows in pack(mine, most)]
    return found
