"""Several processes that share one run: shards that know nothing of each other, or a team that a launcher started.

Every process of `--shard` or `accelerate launch` holds the model and answers its share of the questions into a file of
its own. The last shard to end, or the main process of a launcher, shows the tables.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from ...errors import UserError
from ...options.settings import Settings
from .child import is_child

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        launched: whether a launcher started them, so that they can wait for each other.
        leads: whether this process starts the others and waits for them.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False
    leads: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process shows what was found."""
        return self.rank == 0 or not self.launched

    @property
    def is_shard(self) -> bool:
        """Whether the others come and go on their own."""
        return self.size > 1 and not self.launched and not self.leads

    def share(self, jobs: Sequence[T], turn: int = 0) -> Sequence[T]:
        """The jobs of this process. They are dealt in turns: neighbouring jobs are alike, so all processes get about
        the same work.

        Args:
            turn: which process gets the first job.
        """
        return jobs[(self.rank + turn) % self.size :: self.size]

    def meet(self, brought: list[T]) -> list[T]:
        """Wait for all processes that a launcher started, and collect what they brought.

        Raises:
            UserError: one of them ended early.
        """
        if not self.launched:
            return brought
        from accelerate.utils import gather_object

        try:
            gathered: list[T] = gather_object(brought)
            return gathered
        except RuntimeError as error:
            raise UserError(
                "another process of this run ended early; run the same command again to continue"
            ) from error


def speaker() -> str | None:
    """What stands before a message about an error; None if the main process says it."""
    if is_main_process() or is_child():
        return ""
    from torch import distributed

    # Until they have joined, all processes make the same mistake.
    if not distributed.is_initialized():
        return None
    return f"process {distributed.get_rank()} of {distributed.get_world_size()}: "


def launched() -> int:
    """Number of processes that a launcher started; 1 without one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and int(size) > 1 else 1


def is_main_process() -> bool:
    """Whether this process is the one that prints; known before anything is joined."""
    return not is_child() and (launched() == 1 or os.environ.get("RANK", "0") == "0")


def join(settings: Settings, shard: str | None = None) -> Team:
    """Meet the other processes of this run, and take the device that the launcher meant for this one.

    Args:
        shard: number of this process, from 1, and of all, such as "3/8", where nothing else starts them.

    Raises:
        UserError: the settings do not go with the way the run was started.
    """
    if launched() == 1:
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            warnings.warn(
                "accelerate launch --cpu started this one process, whatever --num_processes says: it needs mpirun for "
                "more. To share the run: paged-eviction eval --workers 2 ...",
                stacklevel=2,
            )
        return Team(*_numbers(shard))
    if shard:
        raise UserError(f"--shard {shard}: the launcher already splits the run; leave out --shard")
    if settings.device_map:
        raise UserError("--device-map auto takes all devices for one process: start it without a launcher")
    if ":" in settings.device:
        raise UserError(
            f"the launcher gives every process a device of its own: write --device {settings.device.split(':')[0]}"
        )
    from accelerate import PartialState

    # Who waits, waits for one that reads data; the launcher ends all when one dies.
    state = PartialState(cpu=settings.device == "cpu", timeout=timedelta(hours=12))
    return Team(state.process_index, state.num_processes, launched=True)


def _numbers(shard: str | None) -> tuple[int, int]:
    """Rank, from 0, and size."""
    number, _, count = (shard or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--shard {shard}: write NUMBER/COUNT, counted from 1, such as 3/8")
    return int(number) - 1, int(count)


def leave() -> None:
    """Say good-bye to the other processes."""
    if launched() > 1:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
