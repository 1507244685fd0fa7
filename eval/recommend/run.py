"""What `paged-eviction recommend` does: read, compare, show and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from hf_paged_eviction.integration.models import why_not_ours
from hf_paged_eviction.integration.window import trained_window
from hf_paged_eviction.naming.sizes import readable_bytes
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ..caches.budgets import FULL, Budget, parse_budgets
from ..caches.sizes import tokens_held
from ..errors import UserError
from ..models import loading as models
from ..models.environment import timed_on
from ..options.base import flag
from ..options.model import ModelOptions
from ..options.recommend import GridOptions, RecommendOptions
from ..options.requests import model_settings
from ..options.run_file import NAME as RUN_FILE
from ..options.run_file import written
from ..options.settings import Settings
from ..running.generation import end_tokens
from ..running.meaning import model_meaning
from ..running.memory import free_memory
from ..running.terminal import progress, say
from ..store.results import SUMMARY, ResultFolder, settings_differences
from ..store.summaries.terminal import to_terminal
from .candidates import Candidate, grid, with_defaults
from .passages import Passage, digest, make_texts, task_passages, text_passages
from .plot import plot_front
from .ranking import Found, cost, front, full_cache, rank
from .search import Search, row_key
from .show import code, command, cost_line, reasons, table
from .sizes import Entry, LeftOut, entries

#: How many times longer than what is held a passage is where nobody says, and the shortest such.
TIMES, SHORTEST = 4, 256
PLOT = "front.png"
#: These say what is compared, not what a row means: a folder may go on with others.
_GROWS = {
    *GridOptions.model_fields,
    *("budgets", "passages", "share", "batch_size", "decide_by"),
    *("output", "config", "attn_implementation"),
}


def run_recommend(options: RecommendOptions) -> dict[str, Found]:
    """Search, print and write; the best candidate of each size.

    Raises:
        UserError: with the way out.
    """
    notes = Console(stderr=True)
    sizes = asked_sizes(options)
    candidates = grid(options)
    _check_sources(options)
    settings = model_settings(ModelOptions(**options.common(ModelOptions)))
    config, tokenizer = models.load_config(settings), models.load_tokenizer(settings)
    texts = [] if options.task_file else make_texts(options)
    model = models.load_model(settings.but(attn_implementation=_attention(settings, candidates, config)))
    if "policies" not in options.model_fields_set:
        candidates = with_defaults(candidates, model.config)
    length = options.length or _length(model, options, sizes)
    if options.task_file:
        window = options.length or trained_window(config)
        passages = task_passages(options.task_file, options, tokenizer, window, options.passages)
    else:
        passages = text_passages(texts, tokenizer, length, options.answer_tokens, options.passages)
    _check_evicts(model, options, sizes, passages)
    compared, left_out = entries(model, options, sizes, candidates, passages[0].tokens)
    if not compared:
        raise UserError("no candidate is possible:\n" + "\n".join(reasons(left_out)))
    meaning = _meaning(options, settings, passages) | model_meaning(model, settings)
    with ResultFolder(options.output, {"": meaning}, row_key).opened() as kept:
        for note in settings_differences(kept):
            say(notes, f"note: {note}")
        kept.write_meta({"search": True})
        kept.write_text(RUN_FILE, run_file(options))
        _tell(notes, compared, passages, options)
        search = Search(model, options, compared, passages, kept, end_tokens(model, tokenizer))
        with progress(notes, "readings", "a smaller --share or --length, fewer --policies") as watch:
            search.run(watch)
        return _finish(notes, search, left_out, settings.device)


def asked_sizes(options: RecommendOptions) -> tuple[Budget, ...]:
    """How much may be held.

    Raises:
        UserError: it is not said, or cannot be read.
    """
    if options.budgets is None:
        raise UserError("how much may be held? --budget with bytes (2GiB), tokens (1024) or a share of a passage (25%)")
    found = parse_budgets(options.budgets)
    if any(size.is_full for size in found):
        raise UserError("full: the full cache is what all are compared with; name sizes only")
    return found


def _check_sources(options: RecommendOptions) -> None:
    texts = [*(options.text or ()), *(options.files or ())]
    if options.task_file and texts:
        raise UserError(f"give texts ({texts[0]}) or --task-file {options.task_file}, not both")
    given = options.model_fields_set
    wrong = [name for name in ("template", "max_new_tokens", "question_aware") if name in given]
    if wrong and not options.task_file:
        raise UserError(f"{', '.join(map(flag, wrong))}: about records of your own, say --task-file")
    if options.task_file and "answer_tokens" in given:
        raise UserError("--answer-tokens: about texts; how long answers to prompts may be says --max-new-tokens")


def _attention(settings: Settings, candidates: Sequence[Candidate], config: Any) -> str | None:
    """The implementation that shows queries if a candidate needs it and the model can be served with it."""
    if settings.attn_implementation is not None:
        return settings.attn_implementation
    wanted = any(each.needs_queries for each in candidates)
    return PAGED_EVICTION if wanted and why_not_ours(config) is None else None


def _length(model: Any, options: RecommendOptions, sizes: Sequence[Budget]) -> int:
    """Tokens of a passage where nobody says."""
    counts = [_plain_tokens(model, options, size, 1024) for size in sizes]
    window = trained_window(model.config) or 2**20
    return min(max(TIMES * max(counts), SHORTEST, 2 * options.answer_tokens), window)


def _plain_tokens(model: Any, options: RecommendOptions, size: Budget, length: int) -> int:
    """Tokens held as they come, of so many; 0 where too few fit: whether a candidate does, it says itself."""
    try:
        return tokens_held(size, model, Candidate("recency").options(options), "recency", length) or 0
    except UserError:
        return 0


def _check_evicts(model: Any, options: RecommendOptions, sizes: Sequence[Budget], passages: Sequence[Passage]) -> None:
    """Refuse sizes that hold all there is to read."""
    longest = max(each.tokens for each in passages)
    for size in sizes:
        tokens = _plain_tokens(model, options, size, longest)
        if tokens >= longest:
            raise UserError(
                f"{size.label} holds {tokens:,} tokens of this model, and the longest passage has {longest:,}: nothing "
                "would have to go, and DynamicCache is as good. Give less memory, longer texts or a larger --length "
                f"(the model was made for {trained_window(model.config)} tokens)"
            )


def _meaning(options: RecommendOptions, settings: Settings, passages: Sequence[Passage]) -> dict[str, Any]:
    """What decides the numbers of a row."""
    found = {name: value for name, value in options.as_json().items() if name not in _GROWS}
    found = {name: value for name, value in found.items() if name not in ("text", "files", "task_file", "length")}
    # The first passage is there whatever their number: texts are told apart by it.
    return found | {"device": settings.device, "first_passage": digest(passages[:1])}


def run_file(options: RecommendOptions) -> str:
    """The YAML that `--config` reads back."""
    given = options.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"config"})
    head = f"`paged-eviction recommend --config {options.output / RUN_FILE}` repeats or continues the search."
    return written(head, given)


def _tell(notes: Console, compared: Sequence[Entry], passages: Sequence[Passage], options: RecommendOptions) -> None:
    longest, shortest = (which(each.tokens for each in passages) for which in (max, min))
    tokens = f"{longest:,}" if longest == shortest else f"{shortest:,} to {longest:,}"
    say(notes, f"{len(compared)} candidates, {len(passages)} passages of {tokens} tokens")
    if len(passages) * options.share < 1:
        say(
            notes,
            f"note: every candidate reads a passage at least, so that {len(passages)} passages cannot be searched for "
            f"a share of {options.share:g}: give more or longer texts, or a smaller --length",
        )


def _finish(notes: Console, search: Search, left_out: list[LeftOut], device: str) -> dict[str, Found]:
    options, folder = search.options, search.kept
    compared = {name for _, name in search.entries}
    failed: dict[str, list[str]] = {}
    broken = len({key[:2] for key, row in search.rows.items() if row["failed"] and key[:2] in search.entries})
    for row in search.rows.values():
        if row["failed"] and row["candidate"] in compared:
            failed.setdefault(row["failed"], []).append(row["candidate"])
    left_out = [*left_out, *(LeftOut(reason, tuple(dict.fromkeys(names))) for reason, names in failed.items())]
    rows = {key: row for key, row in search.rows.items() if row["candidate"] in {*compared, FULL}}
    found = rank(rows, search.left, options.decide_by)
    best = {size: next(each for each in found if each.size == size) for size in dict.fromkeys(f.size for f in found)}
    if not best:
        raise UserError("no candidate could be read:\n" + "\n".join(reasons(left_out)))
    numbered = sorted(front(found), key=lambda each: each.divergence)
    known = {name: row["tokens"] for (_, who, name), row in rows.items() if who == FULL}
    took = cost(
        rows.values(), len(search.entries) - broken, [known.get(each.name, each.tokens) for each in search.passages]
    )
    plot_front(found, numbered, list(best.values()), folder.path / PLOT)
    chosen = {
        size: {
            "code": code(search.entries[size, each.candidate], options, each.held),
            "command": command(search.entries[size, each.candidate], options, each.held),
        }
        for size, each in best.items()
    }
    folder.write_json(
        SUMMARY,
        {
            "recommended": {size: asdict(each) | chosen[size] for size, each in best.items()},
            "front": [asdict(each) for each in numbered],
            "all": [asdict(each) for each in found],
            "left_out": [asdict(each) for each in left_out],
            "cost": asdict(took) | {"share": took.share},
            "environment": timed_on(device),
        },
    )
    _show(notes, search, found, numbered, chosen)
    for note in reasons(left_out):
        say(notes, note)
    say(notes, cost_line(took, len(search.entries) - broken, len(search.passages)))
    say(notes, f"written to {folder.path}: rows, {SUMMARY}, {RUN_FILE}, {PLOT} and front.svg")
    return best


def _show(
    notes: Console, search: Search, found: Sequence[Found], numbered: Sequence[Found], chosen: dict[str, dict[str, str]]
) -> None:
    out = Console()
    for size, lines in chosen.items():
        out.print(to_terminal(table(size, [each for each in found if each.size == size], numbered)))
        out.print()
        say(out, lines["code"])
        out.print()
        say(out, lines["command"])
        out.print()
    whole, step = full_cache(search.rows)
    say(notes, f"the full cache takes {readable_bytes(whole)} and {step:.3g} ms per step")
    free_memory()
