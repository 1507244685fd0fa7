"""What graphs of a compiled model are told: calls that stay outside, and tensors that stay where they are."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")
_REASON = (
    "a PagedEvictionCache counts tokens outside of graphs. fullgraph=True needs PagedEvictionCache(..., static=True) "
    "and forwards of one token; leave fullgraph out for any other"
)
#: torch shows this reason if a graph must not break; releases before 2.7 take no reason.
_TOLD: dict[str, Any] = {"reason": _REASON} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}


def outside_graphs(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator for functions that compiled code may call but must not contain, such as forwards of several tokens."""
    disabled: Callable[_P, _T] = torch.compiler.disable(call, **_TOLD)
    return disabled


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one that keeps its address, for compiled graphs."""
    if not torch.compiler.is_compiling():
        # Not guarded by identity, so that the next cache of the same shape runs the same graph.
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor
