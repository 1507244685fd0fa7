"""A task whose records stand in files: where they are, what columns they have, how each becomes a sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ..errors import UserError
from ..hub import download
from ..options.settings import TaskSettings
from .records import Kind, Located, Record, checked, parse
from .sample import Sample
from .sources import (
    DatasetPlace,
    Source,
    dataset_rows,
    local_source,
    own_dataset,
    read_source,
    zip_source,
)


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
        convert: makes the sample from a record, its number from 0, and its place. Raises ValueError if the record is
            not of this task.
        files: looked for in `--data-dir`; the first that is there is read.
        hub: None where the authors publish a generator instead of records.
        without: what to do where there are no records.
        columns: that a record must have.
        optional: columns that it may have, and that are used.
        prompt: the template of the prompt; results record its digest.
        records: number of records in the official file, if known.
        sha256: of the official file, if known.
        says: what records may say in their column `dataset`.
        own: where the records of a task of the user are: a file, or `datasets:ID`.
        metric: that the user named for it.
    """

    name: str
    description: str
    convert: Callable[[Record, int, str], Sample]
    files: tuple[str, ...] = ()
    hub: Hub | None = None
    without: str = ""
    columns: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    prompt: str = ""
    records: int | None = None
    sha256: str | None = None
    says: tuple[str, ...] = ()
    own: Path | None = None
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
            try:
                sample = self.convert(record, index, where)
            except ValueError as error:
                raise UserError(f"{where}: {error}, so this is not {self.name}") from error
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
        data = hashlib.sha256()
        if self._dataset:
            rows = json.dumps(
                [row for _, row in self._located(settings)], sort_keys=True, ensure_ascii=False, default=str
            )
            data.update(rows.encode("utf-8", "surrogatepass"))
        else:
            for source in self._sources(settings):
                data.update(source.content)
        return {"data": data.hexdigest(), "prompt": hashlib.sha256(self.prompt.encode()).hexdigest()}

    def note(self, settings: TaskSettings) -> str | None:
        """A sentence on how the records differ from the official ones; None if they do not, or if that cannot be
        known.

        Raises:
            UserError: they say themselves that they are of another task.
        """
        if self.records is None:
            return None
        records = [record for _, record in self._checked(settings)]
        datasets = sorted({str(record["dataset"]) for record in records if record.get("dataset")})
        if wrong := [name for name in datasets if self.says and name not in self.says]:
            raise UserError(
                f"{self.name}: the records in {settings.data_dir} belong to the "
                f"task {wrong[0]!r}; rename the file to that, or read it with --task-file"
            )
        not_official = f"not a score of LongBench's {self.name}"
        if len(records) != self.records:
            return f"{self.name}: {len(records)} records, the official file has {self.records}: {not_official}"
        if self.sha256 and self.digests(settings)["data"] != self.sha256:
            return f"{self.name}: as many records as the official file, and others: {not_official}"
        return None

    def _checked(self, settings: TaskSettings) -> Iterator[tuple[str, Record]]:
        for where, value in self._located(settings):
            yield where, checked((where, value), self.name, self.columns, self.optional)

    def _located(self, settings: TaskSettings) -> Iterable[Located]:
        if self._dataset is None:
            return (value for source in self._sources(settings) for value in parse(source))
        return ((f"{self.own}, row {number}", row) for number, row in enumerate(dataset_rows(self._dataset), 1))

    @property
    def _dataset(self) -> DatasetPlace | None:
        """The dataset that the user named in place of a file."""
        return own_dataset(self.own) if self.own else None

    def _sources(self, settings: TaskSettings) -> list[Source]:
        if self.own:
            return [read_source(self.own)]
        if settings.data_dir is not None:
            return [local_source(settings.data_dir, self.files)]
        if self.hub is None:
            raise UserError(f"{self.name} needs records: {self.without}")
        try:
            revision = settings.dataset_revision or self.hub.revision
            paths = [download(self.hub.repositories, name, revision) for name in self.hub.files]
        except UserError as error:
            raise UserError(f"{self.name}: {error}\n{self.without}".rstrip()) from error
        return [zip_source(path, self.files) if path.suffix == ".zip" else read_source(path) for path in paths]
