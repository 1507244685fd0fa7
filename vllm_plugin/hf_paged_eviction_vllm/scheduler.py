"""Schedulers that end the last chunk but one of each prompt with a whole block, so that a snapshot can begin there.

`--scheduler-cls hf_paged_eviction_vllm.scheduler.AsyncScheduler` (`Scheduler` with `--no-async-scheduling`). Stock
schedulers have the place for this, but use it for models with Mamba layers only.
"""

from typing import Any

from vllm.v1.core.sched import async_scheduler, scheduler


class _Cutting:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *computed: int) -> int:
        start = request.num_computed_tokens + sum(computed)
        last = request.num_prompt_tokens // self.block_size * self.block_size  # type: ignore[attr-defined]
        return last - start if start < last < start + num_new_tokens else num_new_tokens


class Scheduler(_Cutting, scheduler.Scheduler):
    """See the module."""


class AsyncScheduler(_Cutting, async_scheduler.AsyncScheduler):
    """See the module."""
