"""What a person is shown of a search, the choice as code and as options of commands among it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.naming.sizes import readable_bytes

from ..options.recommend import RecommendOptions
from ..store.summaries.table import Table, simple_table
from .candidates import DROP
from .ranking import Cost, Found
from .sizes import Entry, LeftOut

_COLUMNS = ("candidate", "in plot", "divergence", "passages", "tokens", "bytes", "step, ms")
#: Lines per size besides those of the front.
_MOST = 6


def table(size: str, found: Sequence[Found], numbered: Sequence[Found]) -> Table:
    """The front of a size with its numbers in the plot, and the next best."""
    others = [each for each in found if each not in numbered][:_MOST]
    shown = sorted([*(one for one in numbered if one.size == size), *others], key=lambda one: one.divergence)
    rows = (
        (
            each.candidate,
            str(numbered.index(each) + 1) if each in numbered else None,
            f"{each.divergence:.4g}" + ("" if each.error is None else f" ± {each.error:.2g}"),
            each.passages,
            each.held,
            readable_bytes(each.bytes) + (f" + {readable_bytes(each.host_bytes)} host" if each.host_bytes else ""),
            f"{each.step_ms:.3g}",
        )
        for each in shown
    )
    tied = [each.candidate for each in found if each.tied]
    names = "; ".join(tied[:_MOST]) + (f" and {len(tied) - _MOST} more" if len(tied) > _MOST else "")
    note = f"no difference seen between {names}: more --passages may show one" if len(tied) > 1 else ""
    return simple_table(f"at {size}", _COLUMNS, rows, note)


def cost_line(cost: Cost, candidates: int, passages: int) -> str:
    """What it took."""
    return (
        f"{cost.tokens:,} tokens read, {cost.share:.1%} of what {candidates} candidates and the full cache on all "
        f"{passages} passages would take; {cost.seconds:.0f} s of forwards"
    )


def reasons(left_out: Sequence[LeftOut]) -> list[str]:
    """A sentence for each reason, with the candidates it holds for."""
    found = []
    for each in left_out:
        names = "; ".join(each.candidates[:3]) + (" ..." if len(each.candidates) > 3 else "")
        found.append(f"left out {len(each.candidates)} ({names}): {each.reason}")
    return found


def code(entry: Entry, options: RecommendOptions, held: int) -> str:
    """Lines to paste into a program that has a `model` and `inputs`.

    Args:
        held: tokens per layer that were found to fit.
    """
    candidate = entry.candidate
    given = candidate.arguments(options).items()
    # In double quotes, as the lines around it.
    shown = (f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}" for name, value in given)
    words = [_size(entry, held), *shown]
    lines = ["from hf_paged_eviction import PagedEvictionCache", ""]
    if candidate.needs_queries:
        lines.append('model.set_attn_implementation("paged_eviction")')
    lines += [
        f"cache = PagedEvictionCache(model.config, {', '.join(words)})",
        f"model.generate(**inputs, {CACHE_ARGUMENT}=cache, prefill_chunk_size={options.prefill_chunk_size})",
    ]
    return "\n".join(lines)


def command(entry: Entry, options: RecommendOptions, held: int) -> str:
    """A conversation with such a cache."""
    size = _size(entry, held).replace("budget=", "--budget ").replace('"', "")
    return f"paged-eviction chat --model {shlex.quote(options.model)} {size} " + " ".join(
        map(shlex.quote, entry.candidate.flags(options))
    )


def _size(entry: Entry, held: int) -> str:
    """In bytes where the cache takes bytes: with a disposal they would not count what it keeps beside the tokens."""
    if entry.size.memory is None or entry.candidate.disposal != DROP:
        return f"budget={held}"
    return f'budget="{entry.size.label}"'
