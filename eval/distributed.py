"""Several processes that share one run, started by `accelerate launch` or `torchrun`.

Data parallel: the jobs are split, every process writes a file of its own, and the main process merges them when all are
done. Tensor parallel: every process holds a part of each layer and runs every job; the main process writes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from .errors import UserError
from .settings import Settings

T = TypeVar("T")


class MainError(UserError):
    """A mistake that the main process noticed, and has said."""


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process; 0 is the main one.
        size: number of processes.
        split: whether each has jobs of its own (data parallel).
    """

    rank: int = 0
    size: int = 1
    split: bool = True

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, jobs: Sequence[T]) -> Sequence[T]:
        """The jobs of this process. In turns: neighbours are alike, and so is what everyone gets."""
        return jobs[self.rank :: self.size] if self.split else jobs

    def agree(self, make: Callable[[], T]) -> T:
        """What `make` gives in the main process, in all processes; if it raises there, all raise."""
        if self.size == 1:
            return make()
        value: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.is_main:
            try:
                value = [make(), None]
            except Exception as error:
                value, failure = [None, str(error)], error
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(value)
        if failure is not None:
            raise failure
        if value[1] is not None:
            raise MainError(value[1])
        return value[0]  # type: ignore[no-any-return]

    def meet(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


def speaker(error: UserError) -> str | None:
    """What stands before a message about an error; None if the main process says it."""
    if is_main_process():
        return ""
    from torch import distributed

    # Until they have met, all processes make the same mistake.
    if isinstance(error, MainError) or not distributed.is_initialized():
        return None
    return f"process {distributed.get_rank()} of {distributed.get_world_size()}: "


def launched() -> int:
    """Number of processes that a launcher started; 1 without one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and int(size) > 1 else 1


def is_main_process() -> bool:
    """Whether this process is the one that prints; known before anything is joined."""
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


def join(settings: Settings) -> Team:
    """Meet the other processes of this run, and take the device that the launcher meant for this one.

    Raises:
        UserError: the settings do not go with the way the run was started.
    """
    if launched() == 1:
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            warnings.warn(
                "accelerate launch --cpu started this one process, whatever --num_processes says: it needs mpirun for "
                "more. To share the run: torchrun --nproc-per-node 2 -m hf_paged_eviction_eval eval ...",
                stacklevel=2,
            )
        if settings.tensor_parallel:
            raise UserError(
                "--tensor-parallel splits the model over processes, and this is only one: torchrun --nproc-per-node 2 "
                "-m hf_paged_eviction_eval eval --tensor-parallel ..."
            )
        return Team()
    if settings.device_map:
        raise UserError("--device-map auto takes all devices for one process: start it without a launcher")
    if ":" in settings.device:
        raise UserError(
            f"the launcher gives every process a device of its own: write --device {settings.device.split(':')[0]}"
        )
    from accelerate import PartialState

    # Who waits, waits for one that reads data; the launcher ends all when one dies.
    state = PartialState(cpu=settings.device == "cpu", timeout=timedelta(hours=12))
    return Team(state.process_index, state.num_processes, split=not settings.tensor_parallel)


def leave() -> None:
    """Say good-bye to the other processes."""
    if launched() > 1:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
