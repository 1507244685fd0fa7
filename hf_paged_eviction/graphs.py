"""What stays outside the graphs of a compiled model."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_graphs(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """For what compiled code calls but must not contain: forwards of several tokens."""
    disabled: Callable[_P, _T] = torch.compiler.disable(call)
    return disabled
