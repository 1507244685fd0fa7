"""What graphs of a compiled model are told: calls that stay outside, and tensors that stay where they are."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:  # it is not public, so a later release may lack it
    set_eval_frame = None  # type: ignore[assignment]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_REASON = (
    "a PagedEvictionCache counts tokens outside of graphs. fullgraph=True needs PagedEvictionCache(..., static=True) "
    "and forwards of one token; leave fullgraph out for any other"
)


def outside_graphs(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator for functions that compiled code may call but must not contain, such as forwards of several tokens."""
    disabled: Callable[_P, _T] = torch.compiler.disable(call, reason=_REASON)
    return disabled


def _leave_graphs() -> None:
    if set_eval_frame is None:
        raise RuntimeError(
            "This release of torch has no way out of a compiled model: do not compile the model, or use "
            "PagedEvictionCache(..., static=True) and compile forwards of one token only."
        )
    # Before any other call: those would be compiled. The call that was compiled sets it back when it returns.
    set_eval_frame(None)


#: Run the rest of a compiled call as it is, up to its end. Where graphs and calls that stay outside take turns, torch
#: compiles every function between two of these by itself, for every layer.
leave_graphs: Callable[[], None] = torch.compiler.disable(_leave_graphs, recursive=False, reason=_REASON)


@cache
def warn_of_leaving() -> None:
    """Warn once that a model is compiled in vain."""
    warnings.warn(
        "The model is compiled, but with this cache its layers run uncompiled: a PagedEvictionCache counts tokens "
        "outside of graphs. Use PagedEvictionCache(..., static=True), whose steps of one token are compiled.",
        stacklevel=3,
    )


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one that keeps its address, for compiled graphs."""
    if not torch.compiler.is_compiling():
        # Not guarded by identity, so that the next cache of the same shape runs the same graph.
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def static_zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A static tensor of zeros that may be written to inside and outside of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return static(torch.zeros(tuple(shape), dtype=dtype, device=device))
