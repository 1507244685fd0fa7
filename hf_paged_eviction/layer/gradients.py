"""Refuse gradients through tokens of earlier forwards."""

from typing import Any

import torch
from torch import Tensor


class _Refusal(torch.autograd.Function):
    """The first tensor, which needs a gradient if the second does. Asking for it is an error."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, new: Tensor) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "Gradients do not reach the tokens that a cache holds: they would be silently wrong. Process all "
            "tokens that need gradients in one forward of several tokens, and the tokens before them under "
            "torch.no_grad()."
        )


def refuse_gradients(states: tuple[Tensor, Tensor], new: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values whose `backward` raises an error; `new` has a gradient."""
    keys, values = (_Refusal.apply(tensor, new) for tensor in states)  # type: ignore[no-untyped-call]
    return keys, values
