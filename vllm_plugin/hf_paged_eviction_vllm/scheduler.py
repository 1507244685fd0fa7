"""Schedulers that end chunks of prompts where a snapshot can begin: at the last whole block, and where a beginning ends
that another request had, too.

`--scheduler-cls hf_paged_eviction_vllm.scheduler.AsyncScheduler` (`Scheduler` with `--no-async-scheduling`). Stock
schedulers have the place for this, but use it for models with Mamba layers only.
"""

import time
from typing import Any

from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.sched.interface import PauseState

from .spec import EvictionManager


class _Cutting:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See `Scheduler`. A beginning that others share becomes a snapshot, as a request loses its blocks and goes on
        from a copy in the same step."""
        paused = self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]  # then nobody would go on
        managers = [] if paused else self._managers()
        for request in list(self.running):  # type: ignore[attr-defined]
            if any(manager.is_beginning(request) for manager in managers):
                self.running.remove(request)  # type: ignore[attr-defined]
                self.prev_step_scheduled_req_ids.discard(request.request_id)  # type: ignore[attr-defined]
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)  # type: ignore[attr-defined]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _managers(self) -> list[EvictionManager]:
        every = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        return [one for one in every if isinstance(one, EvictionManager) and one.keeps_snapshots]

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *computed: int) -> int:
        start, size = request.num_computed_tokens + sum(computed), self.block_size  # type: ignore[attr-defined]
        ends = [request.num_prompt_tokens // size * size, *(one.shared(request) for one in self._managers())]
        return min([end - start for end in ends if start < end < start + num_new_tokens], default=num_new_tokens)


class Scheduler(_Cutting, scheduler.Scheduler):
    """See the module."""


class AsyncScheduler(_Cutting, async_scheduler.AsyncScheduler):
    """See the module."""
