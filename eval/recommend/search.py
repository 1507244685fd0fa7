"""The search: which candidate reads which passage next, row by row in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..budgets import FULL
from ..errors import UserError
from ..options.recommend import RecommendOptions
from ..running.efficiency import kv_bytes
from ..running.memory import free_memory, is_out_of_memory
from ..store.completion import Progress
from ..store.results import ResultFolder, Row
from .halving import Round, plan, survivors
from .passages import Passage
from .reading import Measured, Reader, Reference
from .sizes import Entry, fewer

Key = tuple[str, str, str]


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
        folder: begun.
        rows: those that it has.
    """

    def __init__(
        self,
        model: Any,
        options: RecommendOptions,
        entries: Sequence[Entry],
        passages: Sequence[Passage],
        folder: ResultFolder,
        rows: dict[Any, Row],
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.model, self.options, self.passages = model, options, passages
        self.entries = {entry.key: entry for entry in entries}
        self.folder, self.rows, self.ends = folder, rows, ends
        self.sizes = list(dict.fromkeys(entry.size.label for entry in entries))
        self.plans = {size: plan(len(self._of(size)), len(passages), options.share) for size in self.sizes}
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
        done = 0
        watch(Progress(0, self.total))
        for index in range(max(map(len, self.plans.values()))):
            for number, keys in self._wanted(index):
                for row in self._read(self.passages[number], keys):
                    done += 1
                    watch(Progress(done, self.total, row["candidate"]))
            for size, rounds in self.plans.items():
                if index < len(rounds):
                    wanted = rounds[index + 1].candidates if index + 1 < len(rounds) else len(self.left[size])
                    self.left[size] = survivors(self._divergences(size, rounds[index].passages), wanted)
        watch(Progress(self.total, self.total))

    def _wanted(self, index: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """Passages of a round, and who reads each."""
        found: dict[int, list[tuple[str, str]]] = {}
        for size, rounds in self.plans.items():
            if index < len(rounds):
                begin = rounds[index - 1].passages if index else 0
                for number in range(begin, rounds[index].passages):
                    found.setdefault(number, []).extend((size, name) for name in self.left[size])
        yield from sorted(found.items())

    def _divergences(self, size: str, passages: int) -> dict[str, list[float]]:
        names = [passage.name for passage in self.passages[:passages]]
        return {
            name: [decides(self.rows[size, name, passage], self.options.decide_by) for passage in names]
            for name in self.left[size]
        }

    def _read(self, passage: Passage, keys: Sequence[tuple[str, str]]) -> Iterator[Row]:
        """The rows of some candidates, read from the folder or measured."""
        reference: Reference | None = None
        reader = Reader(*(self.model, passage, self.options.prefill_chunk_size, self.options.reading_tokens, self.ends))
        for key in keys:
            if (*key, passage.name) not in self.rows:
                reference = reference or self._reference(reader, passage)
                self._write(self._measure(reader, reference, self.entries[key], passage))
            yield self.rows[(*key, passage.name)]

    def _reference(self, reader: Reader, passage: Passage) -> Reference:
        reference, measured, cache = reader.reference()
        if (FULL, FULL, passage.name) not in self.rows:
            held = {"held": cache.get_seq_length(), "bytes": kv_bytes(cache), "host_bytes": 0}
            self._write(_row(FULL, FULL, passage, measured, held))
        return reference

    def _measure(self, reader: Reader, reference: Reference, entry: Entry, passage: Passage) -> Row:
        tokens, again = self._tokens(entry), 0
        while True:
            try:
                cache = entry.make(self.model.config, self.options, tokens)
                measured = reader.measure(cache, reference)
            except UserError as error:
                return _failure(entry, passage, str(error))
            except (ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
                if is_out_of_memory(error):
                    free_memory()
                    return _failure(entry, passage, "ran out of memory")
                return _failure(entry, passage, f"{type(error).__name__}: {error}")
            stats = cache.stats()
            taken = stats.storage_bytes + stats.summary_bytes
            if entry.size.memory is None or taken <= entry.size.memory:
                held = {"held": tokens, "bytes": taken, "host_bytes": stats.host_bytes}
                return _row(*entry.key, passage, measured, held | {"again": again})
            # What was read with too much counts as a cost.
            tokens, again = fewer(tokens, taken, entry.size.memory, self.options), again + measured.tokens

    def _tokens(self, entry: Entry) -> int:
        """As many as fitted when the longest passage was read."""
        row = self.rows.get((*entry.key, self.passages[0].name))
        return entry.tokens if row is None or row["failed"] else int(row["held"])

    def _write(self, row: Row) -> None:
        self.folder.append([row])
        self.rows[row_key(row)] = row


def _row(size: str, candidate: str, passage: Passage, measured: Measured, held: dict[str, int]) -> Row:
    identity = {"size": size, "candidate": candidate, "passage": passage.name, "failed": None}
    numbers = {name: round(value, 7) for name, value in asdict(measured).items()}
    return {**identity, **numbers, "again": 0, **held}


def _failure(entry: Entry, passage: Passage, reason: str) -> Row:
    size, candidate = entry.key
    return {"size": size, "candidate": candidate, "passage": passage.name, "failed": reason}
