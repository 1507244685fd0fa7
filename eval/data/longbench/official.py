"""Whether records are those of LongBench's own file."""

from __future__ import annotations

from ...errors import UserError
from ..records import Record


def differences(
    task: str, count: int, sha256: str | None, says: tuple[str, ...], records: list[Record], digest: str
) -> str | None:
    """A sentence on how records differ from the official ones; None if they do not, or if that cannot be known.

    Args:
        count: of records in the official file; `sha256` is its digest, if known.
        says: what records may say in their column `dataset`; empty: anything.
        records: that were read; `digest` is theirs.

    Raises:
        UserError: they say themselves that they are of another task.
    """
    datasets = sorted({str(record["dataset"]) for record in records if record.get("dataset")})
    if wrong := [name for name in datasets if says and name not in says]:
        raise UserError(
            f"{task}: these records belong to the task {wrong[0]!r}; rename their file, or read it with --task-file"
        )
    if len(records) != count:
        how = f"{len(records)} records, the official file has {count}"
    elif sha256 and digest != sha256:
        how = "as many records as the official file, and others"
    else:
        return None
    return f"{task}: {how}: not a score of LongBench's {task}"
