"""What a model makes of rounding: a deep one in half precision makes much of little."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def coarse(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are in half precision, or less."""
    return torch.finfo(dtype).bits < 32


@contextmanager
def nudged(model: Any) -> Iterator[None]:
    """Within this block each number of an embedded token is moved by about one unit in its last place.

    That is three to four times what rounding a number changes, and stands for what later layers round.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(module: Any, args: Any, states: Tensor) -> Tensor:
        way = torch.randint(0, 2, states.shape, generator=generator).to(states.device) * 2 - 1
        return (states.float() * (1 + torch.finfo(states.dtype).eps * way)).to(states.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()
