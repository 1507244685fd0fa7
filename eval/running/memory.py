"""Running out of memory, on whatever device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..errors import RowsFailed
from ..models.device import is_out_of_memory

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def within_memory(
    pieces: Iterable[Piece],
    results: Callable[[Piece], Iterator[Result]],
    smaller: Callable[[Piece], tuple[Sequence[Piece], Sequence[Any]]],
) -> Iterator[Result]:
    """The results of one piece of work after the other. If memory runs out within a piece, its results so far count.

    Args:
        smaller: given a piece that does not fit: the pieces that are tried instead, and the rows that are given up.

    Raises:
        RowsFailed: after all other results, which rows were given up.
    """
    waiting, failed, reason = [*pieces], list[Any](), ""
    while waiting:
        piece = waiting.pop(0)
        problem = None
        try:
            yield from results(piece)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error) or type(error).__name__
        if problem is not None:  # the error is gone, and with it what its frames refer to
            instead, given_up = smaller(piece)
            del piece
            free_memory()
            waiting[:0] = instead
            failed += given_up
            reason = problem if given_up else reason
    if failed:
        raise RowsFailed(tuple(failed), reason)


def halves(rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Two halves of at least two rows."""
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def free_memory() -> None:
    """Hand back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
