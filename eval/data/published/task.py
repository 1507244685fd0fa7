"""A task of a published suite: where its records are, how a prompt is made of one, how an answer is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ...errors import UserError
from ...options.settings import TaskSettings
from ...tasks import Sample
from ..longbench.hub import download
from ..longbench.records import Kind, Located, Record, parse, shown
from ..longbench.sources import Source, dataset_rows, local_source


@dataclass(frozen=True)
class Hub:
    """Where the authors put the records: files of the first of these dataset repositories that has them.

    Attributes:
        repositories: names of datasets.
        files: read one after the other.
        revision: the commit that is read unless `--dataset-revision` names another. A run also records the SHA-256 of
            what it read, and is not continued with other records.
    """

    repositories: tuple[str, ...]
    files: tuple[str, ...]
    revision: str


@dataclass(frozen=True)
class PublishedTask:
    """One task.

    Attributes:
        name: what `--tasks`, rows and tables call it.
        description: a line for the list of tasks.
        files: looked for in `--data-dir`; the first that is there is read.
        hub: None where the authors publish a generator instead of records.
        without: what to do where there are no records.
        columns: that a record must have.
        optional: columns that it may have, and that are used.
        prompt: all that the prompt has besides the record; its digest is remembered.
        sample: a record and its number, from 0, to a sample. May raise ValueError, for what is none of this task.
    """

    name: str
    description: str
    files: tuple[str, ...]
    hub: Hub | None
    without: str
    columns: Mapping[str, Kind]
    prompt: str
    sample: Callable[[Record, int], Sample]
    optional: Mapping[str, Kind] = field(default_factory=dict)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """The first `settings.limit` samples; all if None.

        Raises:
            UserError: there are no records, or one of them is not of this task.
        """
        found: list[Sample] = []
        first: dict[str, str] = {}
        for index, (where, record) in enumerate(islice(self._questions(settings), settings.limit)):
            try:
                sample = self.sample(record, index)
            except ValueError as error:
                raise UserError(f"{where}: {error}, so this is not {self.name}") from error
            if sample.id in first:
                raise UserError(f"{where}: the same id {sample.id!r} as in {first[sample.id]}; remove one of the two")
            first[sample.id] = where
            found.append(sample)
        if not found:
            raise UserError(f"{self.name}: there is no record")
        return found

    def is_in(self, data_dir: str) -> bool:
        """Whether a folder or zip file holds its records."""
        try:
            local_source(data_dir, self.files)
        except UserError:
            return False
        return True

    def digests(self, settings: TaskSettings) -> dict[str, str]:
        """SHA-256 of the records and of the prompt."""
        data = hashlib.sha256()
        if settings.dataset is not None:
            data.update(repr(list(self._records(settings))).encode())
        else:
            for source in self._sources(settings):
                data.update(source.content)
        return {"data": data.hexdigest(), "prompt": hashlib.sha256(self.prompt.encode()).hexdigest()}

    def _questions(self, settings: TaskSettings) -> Iterator[tuple[str, Record]]:
        """Where a record stands, in words, and the record."""
        for where, found in self._records(settings):
            yield where, self._checked(where, found, self.columns)

    def _records(self, settings: TaskSettings) -> Iterable[Located]:
        if settings.dataset is not None:
            rows = dataset_rows(settings.dataset, None, "test", settings.dataset_revision)
            return ((f"{settings.dataset}, row {number}", row) for number, row in enumerate(rows, 1))
        return (each for source in self._sources(settings) for each in parse(source))

    def _sources(self, settings: TaskSettings) -> list[Source]:
        if settings.data_dir is not None:
            return [local_source(settings.data_dir, self.files)]
        if self.hub is None:
            raise UserError(f"{self.name} needs records: {self.without}")
        try:
            revision = settings.dataset_revision or self.hub.revision
            paths = [download(self.hub.repositories, name, revision) for name in self.hub.files]
        except UserError as error:
            raise UserError(f"{self.name}: {error}\n{self.without}") from error
        return [Source(str(path), path.read_bytes()) for path in paths]

    def _checked(self, where: str, record: object, columns: Mapping[str, Kind]) -> Record:
        if not isinstance(record, dict):
            raise UserError(f"{where}: {shown(record)} is not a record")
        for name in columns:
            if name not in record:
                known = ", ".join(columns)
                raise UserError(f"{where}: no column {name!r}, so this is not {self.name}: its records have {known}")
        for name, kind in {**columns, **self.optional}.items():
            if name in record and not kind.accepts(record[name]):
                raise UserError(f"{where}: {name!r} is {shown(record[name])}, it must be {kind.what}")
        return record
