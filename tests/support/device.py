"""The device that tests run on: `pytest --device cuda`, or `pretend` where there is none."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def use(name: str) -> None:
    """From now on new tensors lie on this device."""
    if name == "pretend":
        import pretend

        pretend.Constructors(default=True).__enter__()
    torch.set_default_device(name)
    SameNumbers(torch.device(name)).__enter__()


class SameNumbers(TorchFunctionMode):
    """Random numbers of a seeded generator are those of the CPU on every device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(kwargs.get("generator"), torch.Generator):
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):  # such as `normal_`
            return args[0].copy_(func(args[0].cpu(), *args[1:], **kwargs))
        return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs.get("device") or self.device)
