"""A task whose records stand in files: where they are, what columns they have, how each becomes a sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..hub import download
from ..options.settings import TaskSettings
from .records import Located, Record, checked, parse
from .sample import Sample
from .sources import DATASETS, Source, dataset_rows, local_source, read_source


@dataclass(frozen=True)
class Hub:
    """Where the authors published the records: files of the first of these dataset repositories that has them.

    Attributes:
        repositories: names of datasets.
        files: read one after the other; of a zip, the member with one of the file names of the task.
        revision: the commit that is read unless `--dataset-revision` names another. A run also records the SHA-256 of
            what it read, and is not continued with other records.
    """

    repositories: tuple[str, ...]
    files: tuple[str, ...]
    revision: str


@dataclass(frozen=True)
class FileTask:
    """One task: of a published suite, or of the user.

    Attributes:
        name: what `--tasks`, rows and tables call it.
        description: a line for the list of tasks.
        convert: makes the sample from a record, its number from 0, and its place.
        files: looked for in `--data-dir`; the first that is there is read.
        hub: None where the authors publish a generator instead of records.
        without: what to do where there are no records.
        columns: that a record has, see `records.checked`.
        prompt: the template of the prompt; results record its digest.
        official: compares records and their SHA-256 with the official file, see `note`.
        own: where the records of a task of the user are: a file, or `datasets:ID`.
        metric: that the user named for it.
    """

    name: str
    description: str
    convert: Callable[[Record, int, str], Sample]
    files: tuple[str, ...] = ()
    hub: Hub | None = None
    without: str = ""
    columns: Any = dict[str, Any]
    prompt: str = ""
    official: Callable[[list[Record], str], str | None] | None = None
    own: str | None = None
    metric: str | None = None

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """The first `settings.limit` samples, all if None. They record if `settings.max_new_tokens` differs from the
        protocol.

        Raises:
            UserError: there are no records, or one of them is not of this task.
        """
        samples: list[Sample] = []
        first: dict[str, str] = {}
        for index, (where, record) in enumerate(islice(self._checked(settings), settings.limit)):
            sample = self.convert(record, index, where)
            if sample.id in first:
                raise UserError(f"{where}: the same id {sample.id!r} as in {first[sample.id]}; remove one of the two")
            first[sample.id] = where
            samples.append(sample)
        if not samples:
            raise UserError(f"{self.name}: there is no record in {self.own or settings.data_dir}")
        return [sample.with_answers_of(settings.max_new_tokens) for sample in samples]

    def is_in(self, data_dir: str) -> bool:
        """Whether a folder or zip file holds its records."""
        try:
            local_source(data_dir, self.files)
        except UserError:
            return False
        return True

    def digests(self, settings: TaskSettings) -> dict[str, str]:
        """SHA-256 of the records, and of the prompt."""
        if self._is_dataset:
            rows = json.dumps(dataset_rows(self.own or ""), sort_keys=True, ensure_ascii=False, default=str)
            parts = [rows.encode("utf-8", "surrogatepass")]
        else:
            parts = list(map(read_source, self._sources(settings)))
        prompt = hashlib.sha256(self.prompt.encode()).hexdigest()
        return {"data": hashlib.sha256(b"".join(parts)).hexdigest(), "prompt": prompt}

    def note(self, settings: TaskSettings) -> str | None:
        """A sentence on how the records differ from the official ones; None if they do not, or if that cannot be
        known.

        Raises:
            UserError: they say themselves that they are of another task.
        """
        if self.official is None:
            return None
        return self.official([record for _, record in self._checked(settings)], self.digests(settings)["data"])

    def _checked(self, settings: TaskSettings) -> Iterator[tuple[str, Record]]:
        if self._is_dataset:
            rows = enumerate(dataset_rows(self.own or ""), 1)
            values: Iterable[Located] = ((f"{self.own}, row {number}", row) for number, row in rows)
        else:
            values = (value for path in self._sources(settings) for value in parse(str(path), read_source(path)))
        return ((where, checked((where, value), self.name, self.columns)) for where, value in values)

    @property
    def _is_dataset(self) -> bool:
        return self.own is not None and self.own.startswith(DATASETS)

    def _sources(self, settings: TaskSettings) -> list[Source]:
        if self.own:
            return [Path(self.own)]
        if settings.data_dir is not None:
            return [local_source(settings.data_dir, self.files)]
        if self.hub is None:
            raise UserError(f"{self.name} needs records: {self.without}")
        try:
            revision = settings.dataset_revision or self.hub.revision
            paths = [download(self.hub.repositories, name, revision) for name in self.hub.files]
        except UserError as error:
            raise UserError(f"{self.name}: {error}\n{self.without}".rstrip()) from error
        return [local_source(str(path), self.files) if path.suffix == ".zip" else path for path in paths]
