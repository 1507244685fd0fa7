"""A whole run: rows are computed, then everything is summarised and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_paged_eviction.internals import trained_window

from ..data.prompting.prompts import Batch, longest_context
from ..grouping import grouped
from ..models.loading import load_config, load_tokenizer
from ..options.settings import Settings, TaskSettings, TextSettings
from ..progress import Watch
from ..store.prompt_file import PROMPTS, as_lines
from ..store.results import SUMMARY, write_json, write_whole
from ..tasks.suites import data_notes, score
from .batches import make_batches, pack, refuse_long
from .completion import Key, Outcome, Share, Work, complete
from .facts import task_facts, text_facts
from .grid import filled
from .meaning import prompt_digest, text_digest
from .perplexity import make_text_jobs, run_texts, text_row_key, text_variants
from .processes.children import default_workers
from .processes.distributed import Team, join
from .runner import run_batch
from .variants import batch_keys, check_caches, row_key, variants

S = TypeVar("S", bound=Settings)


def evaluate_tasks(
    settings: TaskSettings,
    output: Path,
    workers: int | None,
    watch: Watch,
    say: Callable[[str], None] = lambda text: None,
    log_samples: bool = False,
    shard: str | None = None,
    fill: bool = False,
) -> Outcome | None:
    """Answer every question under every policy and budget.

    Args:
        settings: what is asked.
        output: folder of results; rows that it has already are not computed again.
        workers: processes that this one starts; None chooses.
        watch: told of progress.
        say: told, before anything is computed, which prompts are too long for the model.
        log_samples: write every prompt as the model reads it, see `store.prompt_file`.
        shard: which of the questions are this process's, see `distributed.join`.
        fill: also what earlier commands asked in this folder, see `grid.filled`.

    Returns:
        None in all processes of a launched run but the main one.
    """
    settings = filled(settings, output) if fill else settings
    team = join(settings, shard)
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    listed = variants(settings)
    check_caches(config, settings, listed)
    batches = make_batches(settings, tokenizer, config)
    if settings.over_long == "refuse":
        refuse_long(batches, longest_context(config, tokenizer))
    batches = team.same(batches)
    check_scorers(batches, settings)
    facts, notes = task_facts(settings, batches), data_notes(settings.tasks, settings)
    facts = {**facts, **({"data_notes": notes} if notes else {})}
    for note in notes.values():
        say(note)
    for note in long_prompts(facts["tasks"], longest_context(config, tokenizer)):
        say(note)
    team, teams = _teams(team, workers, settings, len(batches))
    shares = [[(batch, batch_keys(settings, batch)) for batch in share_batches(team, batches)] for team in teams]
    prompts: dict[Key, str] = {
        variant.key(batch, prompt): digest
        for batch in batches
        for digests in [[prompt_digest(prompt) for prompt in batch.prompts]]
        for variant in listed
        for prompt, digest in zip(batch.prompts, digests, strict=True)
    }
    highest = max(max(*prompt.context, *prompt.question, 0) for batch in batches for prompt in batch.prompts)
    work = Work(settings, config, tokenizer, output, run_batch, row_key, shares, prompts, listed, facts, highest)
    outcome = complete(team, work, watch)
    if outcome is not None and not outcome.others:
        write_tasks(outcome)
        if log_samples:
            write_whole(outcome.folder.path / PROMPTS, as_lines(batches, tokenizer))
    return outcome


def evaluate_texts(
    settings: TextSettings,
    output: Path,
    workers: int | None,
    watch: Watch,
    say: Callable[[str], None] = lambda text: None,
    shard: str | None = None,
    fill: bool = False,
) -> Outcome | None:
    """Predict every text under every policy and budget; arguments and result as of `evaluate_tasks`."""
    settings = filled(settings, output) if fill else settings
    team = join(settings, shard)
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    listed = text_variants(settings)
    check_caches(config, settings, listed)
    jobs = make_text_jobs(settings, tokenizer)
    window = trained_window(config)
    for note in long_texts(settings, jobs[0].length, window):
        say(note)
    facts = {**text_facts(jobs), "window": window}
    team, teams = _teams(team, workers, settings, len(jobs))
    every = [(job, job.keys()) for job in jobs]
    shares: list[Share] = [team.share(every) for team in teams]
    texts = {name: (ids, job.length) for job in jobs for name, ids in zip(job.names, job.tokens, strict=True)}
    digests = {name: text_digest(*text) for name, text in texts.items()}
    prompts: dict[Key, str] = {key: digests[key.text] for _, keys in every for key in keys}
    highest = max(max(ids) for job in jobs for ids in job.tokens)
    work = Work(settings, config, tokenizer, output, run_texts, text_row_key, shares, prompts, listed, facts, highest)
    outcome = complete(team, work, watch)
    if outcome is not None and not outcome.others:
        write_texts(outcome, jobs[0].length, window)
    return outcome


def write_tasks(outcome: Outcome) -> None:
    """What rows over tasks come to: a summary and plots."""
    from ..tables.frame import long_frame
    from ..tables.means import cell_records, cells_of
    from ..tables.plot import accuracy_by_task, mean_accuracy
    from ..tables.plot_style import save

    frame = long_frame(outcome.rows)
    cells = cells_of(frame)
    write_json(outcome.folder.path / SUMMARY, cell_records(cells))
    if len(cells):
        save(mean_accuracy(frame), outcome.folder.path / "accuracy.png")
        save(accuracy_by_task(cells)[0], outcome.folder.path / "accuracy_by_task.png")


def write_texts(outcome: Outcome, length: int, window: int | None) -> None:
    """What rows over texts come to: a summary and a plot."""
    from ..tables.means import curve_records, curves
    from ..tables.plot import perplexity_by_position
    from ..tables.plot_style import save

    table = curves(outcome.rows)
    write_json(outcome.folder.path / SUMMARY, curve_records(table))
    if len(table):
        save(perplexity_by_position(table, length, window)[0], outcome.folder.path / "perplexity.png")


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


def _teams(team: Team, workers: int | None, settings: Settings, jobs: int) -> tuple[Team, list[Team]]:
    """This process in its team, then it and those that it starts, each with a share."""
    count = (workers or default_workers(settings, jobs)) if team.size == 1 else 1
    if count == 1:
        return team, [team]
    teams = [Team(rank, count, leads=rank == 0) for rank in range(count)]
    return teams[0], teams


def check_scorers(batches: Sequence[Batch], settings: TaskSettings) -> None:
    """Score the right answer of one sample of each task, so that a package that is missing is missed now.

    Raises:
        UserError: which one, and the extra that brings it.
    """
    for sample in {batch.task: batch.prompts[0].sample for batch in batches}.values():
        score(sample, sample.answers[0], settings)


def share_batches(team: Team, batches: Sequence[Batch]) -> list[Batch]:
    """The batches of this process: questions about one context stay together, whatever the size of the batches."""
    if team.size == 1 or not team.split:
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
