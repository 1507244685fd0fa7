"""Which weights have read what is stored."""

import threading
import weakref
from collections.abc import Iterator

from torch import Tensor, nn

#: What an adapter layer of PEFT says of itself: which adapters act, and how.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


class Weights:
    """Notices that the weights of a model have changed: a training step, `load_state_dict`, another adapter.

    Each parameter and each persistent buffer is known by its identity, its address and the number of operations that
    have changed it in place. Changes by way of `parameter.data` are not counted by torch: call `forget` after them.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._changes = 0
        self._lock = threading.Lock()  # requests come from other threads than that of the forwards

    @property
    def changes(self) -> int:
        """Number of changes so far that `key` noticed, those of adapters aside."""
        return self._changes

    def forget(self) -> None:
        """From now on all is taken for changed."""
        with self._lock:
            self._changes += 1

    def key(self) -> str:
        """Name of the weights that are active now. What two keys that differ have read is not the same."""
        with self._lock:
            tensors = list(_tensors(self._model))
            facts = [_facts(tensor) for tensor in tensors]
            same = len(tensors) == len(self._seen) and all(
                old() is tensor and own == (address, version)
                for tensor, own, (old, address, version) in zip(tensors, facts, self._seen, strict=True)
            )
            if not same:
                self._changes += 1
                self._seen = [(weakref.ref(tensor), *own) for tensor, own in zip(tensors, facts, strict=True)]
            return f"{self._changes} {list(_adapters(self._model))}"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, and buffers that are saved with them; others, such as those of rotations, change in forwards."""
    for module in model.modules():
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _facts(tensor: Tensor) -> tuple[int, int]:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # no memory of its own, such as that of a packed weight
        address = 0
    return address, 0 if tensor.is_inference() else tensor._version


def _adapters(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Adapters of the layers that have some, as text, without repetitions."""
    seen = set()
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            words = tuple(str(getattr(module, name, None)) for name in _ADAPTERS)
            if words not in seen:
                seen.add(words)
                yield words
