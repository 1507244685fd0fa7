"""Which weights have read what is stored."""

import threading
import weakref
from collections.abc import Iterator

from torch import Tensor, UntypedStorage, nn

#: What an adapter layer of PEFT says of itself: which adapters act, and how; and which are merged into its weights.
_ADAPTERS, _MERGED = ("active_adapters", "disable_adapters", "scaling"), "merged_adapters"


class Weights:
    """Notices that the weights of a model have changed: a training step, `load_state_dict`, another adapter.

    Each parameter and each persistent buffer is known by its identity, its memory and the number of operations that
    have changed it in place. Merging adapters into the weights is a change, and so is taking them out again, which
    rounds. torch does not count writes to `parameter.data` and to parameters made in inference mode: call `forget`
    after them.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[_Seen] = []
        self._merged: list[str] = []
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
            layers = [module for module in self._model.modules() if hasattr(module, _MERGED)]
            merged = [str(getattr(layer, _MERGED)) for layer in layers]
            same = (
                merged == self._merged
                and len(tensors) == len(self._seen)
                and all(seen.is_still(tensor) for seen, tensor in zip(self._seen, tensors, strict=True))
            )
            if not same:
                self._changes += 1
                self._seen, self._merged = [_Seen(tensor) for tensor in tensors], merged
            return f"{self._changes} {_adapters(layers)}"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, and buffers that are saved with them; others, such as those of rotations, change in forwards."""
    for module in model.modules():
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


class _Seen:
    """A tensor as it was, without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), _version(tensor)
        address, storage = _memory(tensor)
        # Addresses come back, for one when a module is converted and converted back; storages do not.
        self._address, self._storage = address, storage if storage is None else weakref.ref(storage)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, and it holds the same."""
        if self._tensor() is not tensor or self._version != _version(tensor):
            return False
        address, storage = _memory(tensor)
        return self._address == address and (self._storage() if self._storage else None) is storage


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> tuple[int, UntypedStorage | None]:
    try:
        return tensor.data_ptr(), tensor.untyped_storage()
    except RuntimeError:  # no memory of its own, such as that of a packed weight
        return 0, None


def _adapters(layers: list[nn.Module]) -> str:
    """Which adapters act in each of these layers; what many layers have in common is written once."""
    seen: dict[tuple[str, ...], int] = {}
    kinds = [
        seen.setdefault(tuple(str(getattr(layer, name, None)) for name in _ADAPTERS), len(seen)) for layer in layers
    ]
    return f"{[*seen]} {kinds}"
