"""The search: which candidate reads which passage next, row by row in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..caches.budgets import FULL
from ..errors import UserError
from ..options.model import EMBEDDED
from ..options.recommend import RecommendOptions
from ..running.efficiency import kv_bytes
from ..running.memory import free_memory, is_out_of_memory
from ..running.progress import Progress
from ..store.results import ResultFolder, Row
from .halving import Round, plan, survivors
from .passages import Passage
from .reading import Measured, Reader, Reference
from .sizes import Entry, fewer, reason_of

Key = tuple[str, str, str]
#: Passages that the embedded model reads together: a machine has room for many.
_ROWS = 8


def row_key(row: Row) -> Key:
    """The identity of a row: size, candidate and passage."""
    return row["size"], row["candidate"], row["passage"]


def decides(row: Row, by: str) -> float:
    """The divergence that counts; not a number where the candidate failed."""
    if row["failed"]:
        return float("nan")
    parts = [row[name] for name in ("reading", "answering") if by in (name, "both")]
    return float("nan") if None in parts else sum(parts) / len(parts)


class Search:
    """Successive halving for each size, all sizes together, so that the full cache reads each passage once.

    Args:
        entries: what is compared.
        passages: in the order in which they are read.
        kept: rows of earlier calls; takes those of this one.
    """

    def __init__(
        self,
        model: Any,
        options: RecommendOptions,
        entries: Sequence[Entry],
        passages: Sequence[Passage],
        kept: ResultFolder,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.model, self.options, self.passages = model, options, passages
        self.entries = {entry.key: entry for entry in entries}
        self.kept, self.rows, self.ends = kept, kept.rows, ends
        self.sizes = list(dict.fromkeys(entry.size.label for entry in entries))
        self.plans = {size: plan(len(self._of(size)), len(passages), options.share) for size in self.sizes}
        self.batch_size = options.batch_size or (_ROWS if options.model == EMBEDDED else 1)
        self._watch: Callable[[Progress], object] = lambda state: None
        self._done = 0
        self.left: dict[str, list[str]] = {size: self._of(size) for size in self.sizes}

    def _of(self, size: str) -> list[str]:
        return [candidate for label, candidate in self.entries if label == size]

    @property
    def total(self) -> int:
        """Readings of candidates."""
        return sum(
            each.candidates * (each.passages - before.passages)
            for rounds in self.plans.values()
            for before, each in zip((Round(0, 0), *rounds), rounds, strict=False)
        )

    def run(self, watch: Callable[[Progress], None]) -> None:
        """Read what is missing, and leave in `left` those that were never dropped, best first."""
        self._watch, self._done = watch, 0
        watch(Progress(0, self.total))
        for index in range(max(map(len, self.plans.values()))):
            for numbers, keys in self._wanted(index):
                before = self._done
                self._read([self.passages[number] for number in numbers], keys)
                self._done = before + len(numbers) * len(keys)
            for size, rounds in self.plans.items():
                if index < len(rounds):
                    wanted = rounds[index + 1].candidates if index + 1 < len(rounds) else len(self.left[size])
                    self.left[size] = survivors(self._divergences(size, rounds[index].passages), wanted)
        watch(Progress(self.total, self.total))

    def _tell(self, readings: int, candidate: str) -> None:
        self._done = min(self._done + readings, self.total)
        self._watch(Progress(self._done, self.total, candidate))

    def _wanted(self, index: int) -> Iterator[tuple[list[int], list[tuple[str, str]]]]:
        """Passages of a round that can be read together, and who reads them.

        The first passage stands alone: times are taken while it is read, and it says how much fits.
        """
        readers: dict[int, list[tuple[str, str]]] = {}
        for size, rounds in self.plans.items():
            if index < len(rounds):
                begin = rounds[index - 1].passages if index else 0
                for number in range(begin, rounds[index].passages):
                    readers.setdefault(number, []).extend((size, name) for name in self.left[size])
        together: list[int] = []
        for number in sorted(readers):
            if together and not (self._alike(together, number) and readers[number] == readers[together[0]]):
                yield together, readers[together[0]]
                together = []
            together.append(number)
        if together:
            yield together, readers[together[0]]

    def _alike(self, together: Sequence[int], number: int) -> bool:
        first, other = self.passages[together[0]], self.passages[number]
        same = first.shape == other.shape and bool(first.answer)
        return same and together[0] > 0 and len(together) < self.batch_size

    def _divergences(self, size: str, passages: int) -> dict[str, list[float]]:
        names = [passage.name for passage in self.passages[:passages]]
        return {
            name: [decides(self.rows[size, name, passage], self.options.decide_by) for passage in names]
            for name in self.left[size]
        }

    def _read(self, passages: Sequence[Passage], keys: Sequence[tuple[str, str]]) -> None:
        """Measure what the folder does not have of these."""
        names = [passage.name for passage in passages]
        missing = [key for key in keys if not all((*key, name) in self.rows for name in names)]
        if len(missing) < len(keys):
            self._tell((len(keys) - len(missing)) * len(names), keys[0][1])
        if not missing:
            return
        try:
            self._fill(passages, missing)
        except (RuntimeError, MemoryError) as error:
            if len(passages) == 1 or not is_out_of_memory(error):
                raise
            free_memory()
            half = self.batch_size = len(passages) // 2
            for at in range(0, len(passages), half):
                self._read(passages[at : at + half], keys)

    def _fill(self, passages: Sequence[Passage], keys: Sequence[tuple[str, str]]) -> None:
        """Read with the full cache, then with each candidate."""
        sizes = self.options.prefill_chunk_size, self.options.reading_tokens
        reader = Reader(self.model, passages, *sizes, self.ends)
        reference, measured, cache = reader.reference()
        held = {"held": cache.get_seq_length(), "bytes": kv_bytes(cache) // len(passages), "host_bytes": 0}
        full = [_row(FULL, FULL, *each, held) for each in zip(passages, measured, strict=True)]
        del cache
        self.kept.add(full)
        for key in keys:
            self._tell(0, key[1])
            rows = self._measure(reader, reference, self.entries[key], passages)
            self.kept.add(rows)
            self._tell(len(rows), key[1])

    def _measure(self, reader: Reader, reference: Reference, entry: Entry, passages: Sequence[Passage]) -> list[Row]:
        tokens, again, rows = self._tokens(entry), 0, len(passages)
        while True:
            try:
                cache = entry.make(self.model.config, self.options, tokens)
                measured = reader.measure(cache, reference)
            except (UserError, ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
                if is_out_of_memory(error) and rows > 1:
                    raise
                reason = _reason(error, entry)
                return [{**_identity(*entry.key, passage), "failed": reason} for passage in passages]
            stats = cache.stats()
            taken = (stats.storage_bytes + stats.summary_bytes) // rows
            if entry.size.memory is None or taken <= entry.size.memory:
                held = {"held": tokens, "bytes": taken, "host_bytes": stats.host_bytes // rows, "again": again}
                return [_row(*entry.key, *each, held) for each in zip(passages, measured, strict=True)]
            # What was read with too much counts as a cost.
            tokens = fewer(tokens, taken, entry.size.memory, self.options)
            again += measured[0].tokens

    def _tokens(self, entry: Entry) -> int:
        """As many as fitted when the longest passage was read."""
        row = self.rows.get((*entry.key, self.passages[0].name))
        return entry.tokens if row is None or row["failed"] else int(row["held"])


def _row(size: str, candidate: str, passage: Passage, measured: Measured, held: dict[str, int]) -> Row:
    numbers = {name: value if value is None else round(value, 7) for name, value in asdict(measured).items()}
    return {**_identity(size, candidate, passage), "failed": None, **numbers, "again": 0, **held}


def _identity(size: str, candidate: str, passage: Passage) -> Row:
    return {"size": size, "candidate": candidate, "passage": passage.name}


def _reason(error: Exception, entry: Entry) -> str:
    if is_out_of_memory(error):
        free_memory()
        return "ran out of memory"
    if isinstance(error, UserError | ValueError):
        return reason_of(error, entry.candidate, entry.size)
    return f"{type(error).__name__}: {error}"
