"""What the cache works out by itself is worked out in the types it has, whatever autocast the caller has on.

The model runs under the caller's autocast, and so does the attention that any cache gets. Scores, codes and what is
read beside the cache are not the model's.
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
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Within, autocast is off for this kind of device."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def without_autocast(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """The same call, with autocast off for all devices."""

    @wraps(call)
    def plain(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        if not kinds:
            return call(*args, **kwargs)
        with ExitStack() as all_off:
            for kind in kinds:
                all_off.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return plain
