"""A pretend accelerator: its tensors lie on the CPU and say that they do not.

`pytest --device pretend` runs a test as `--device cuda` will: an operator that mixes devices raises, and whatever the
host reads is noticed. Numbers are those of the CPU, so a test that passes there and fails here is wrong about devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
#: Operators that take tensors of two devices: copies, and indices that lie on the CPU.
_MIXING = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::set_", "aten::index", "aten::_index_put_impl_")


class _Module:
    """What torch asks of the module of a device, `torch.pretend`."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device="cpu")

    def _is_in_bad_fork(self) -> bool:
        return False

    def _nothing(self, *args: object) -> None:
        pass

    set_device = synchronize = manual_seed = manual_seed_all = set_rng_state = _nothing


_setup_privateuseone_for_python_backend(NAME, _Module())
_DEVICE = torch.device(NAME, 0)


class Pretend(torch.Tensor):
    """A tensor of the device; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretend:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=_DEVICE
        )
        wrapper.inner = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _is_here(device: object) -> bool:
    return isinstance(device, torch.device) and device.type == NAME


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    name, tensors = func._schema.name, list(_tensors((args, list(kwargs.values()))))
    mine = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    others = [tensor for tensor in tensors if not isinstance(tensor, Pretend) and tensor.dim()]
    if mine and others and not name.startswith(_MIXING):
        raise RuntimeError(f"all tensors must be on one device: {name} got {_DEVICE} and {others[0].device}")
    device = kwargs.get("device")
    stays = _is_here(device) if device is not None else bool(mine)
    on_cpu = {key: torch.device("cpu") if _is_here(value) else value for key, value in kwargs.items()}
    if name == "aten::histc":  # of whole numbers on accelerators alone
        args = (args[0].float(), *args[1:])
    output = func(*_map(_inner, args), **{key: _map(_inner, value) for key, value in on_cpu.items()})
    if name == "aten::_copy_from":
        return args[1]
    by_inner = {id(tensor.inner): tensor for tensor in mine}

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return by_inner[id(value)] if id(value) in by_inner else Pretend(value) if stays else value

    return _map(outer, output)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Each value that stands in lists and tuples, changed. torch's own function for that takes most of a run."""
    return type(value)(_map(change, one) for one in value) if isinstance(value, list | tuple) else change(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, torch.Tensor):
        yield value


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Pretend) else value


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")


class Constructors(TorchFunctionMode):
    """What torch does with Python's numbers and lists without asking the device, and models that move to it.

    Args:
        default: whether new tensors lie on the device unless it is said otherwise.
    """

    def __init__(self, default: bool = False) -> None:
        super().__init__()
        self.default = default

    def __enter__(self) -> Constructors:
        # A parameter of another type or device is another tensor, as `inner` belongs to one.
        self._before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(self._before)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and self._goes_there(args[0], kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(_DEVICE)
        if func is torch.Tensor.tolist and isinstance(args[0], Pretend):
            return args[0].cpu().tolist()
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], Pretend):
            return _copied(*args)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return func(args[0], _listed(args[1]), *(_made(value, args[0].dtype) for value in args[2:]))
        return func(*args, **kwargs)

    def _goes_there(self, content: Any, device: Any) -> bool:
        if isinstance(content, Pretend):
            return False
        if device is None:
            return self.default and not isinstance(content, torch.Tensor)
        return torch.device(device).type == NAME


def _copied(tensor: Pretend, memo: dict[int, Any]) -> Pretend:
    """What torch copies is a storage, which these do not have."""
    if id(tensor) not in memo:
        memo[id(tensor)] = Pretend(copy.deepcopy(tensor.inner, memo))
    copied: Pretend = memo[id(tensor)]
    return copied


def _made(value: Any, dtype: torch.dtype) -> Any:
    """What is assigned, as a tensor."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype, device="cpu")


def _listed(index: Any) -> Any:
    """An index with tensors in place of lists."""
    if isinstance(index, tuple):
        return tuple(map(_listed, index))
    return torch.tensor(index, device="cpu") if isinstance(index, list | range) else index
