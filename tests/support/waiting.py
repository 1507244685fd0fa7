"""What the host would wait for on an accelerator, noticed on any device."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators whose result the host has to wait for on an accelerator.
_WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "item")


class Watch(TorchDispatchMode):
    """Counts operators and notes those that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waiting: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        self.operators[name] += 1
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        sized_by_tensor = name == "repeat_interleave" and operator._overloadname.startswith("Tensor")
        if name in _WAITING or by_mask or sized_by_tensor:
            self.waiting.append(name)
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None and not name.endswith("_"):
            self.largest = max(self.largest, result.numel())
        return result


@contextmanager
def no_lists() -> Iterator[None]:
    """tolist and numpy read a tensor without passing the dispatcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy"):
            patch.setattr(torch.Tensor, name, lambda self, *_: pytest.fail("a tensor was read on the host"))
        yield


def within(watch: Watch, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, watched, while no tensor may be read as a list."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with watch, no_lists():
            return call(*args, **kwargs)

    return watched
