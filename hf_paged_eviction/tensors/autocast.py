"""The cache's own computations run without autocast.

The model runs under the caller's autocast, and so does the attention to the tensors that a cache returns. Scores, codes
and attention to evicted tokens are the cache's own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_KINDS = ("cpu", "cuda", "xpu", "mps")


def autocast_on(device: torch.device) -> bool:
    """Whether the caller has autocast on for this kind of device."""
    return device.type in _KINDS and torch.is_autocast_enabled(device.type)


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context manager: autocast is off for this kind of device."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def without_autocast(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: call the function with autocast off for all devices."""

    @wraps(call)
    def plain(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        kinds = [*filter(torch.is_autocast_enabled, _KINDS)]
        if not kinds:
            return call(*args, **kwargs)
        with ExitStack() as all_off:
            for kind in kinds:
                all_off.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return plain
