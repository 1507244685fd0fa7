"""A gate that is being trained."""

import torch
from torch import Tensor, nn

from .gates import GateLayer


class Network(nn.Module):
    """What a gate says of a token, as a function that learns.

    Args:
        states: `[n, hidden]`, some of what it will read: it learns how large the numbers are.
        heads: KV heads.
        units: of the layer between; 0 = a line.
    """

    def __init__(self, states: Tensor, heads: int, units: int) -> None:
        super().__init__()
        hidden = states.shape[-1]
        self.inner = nn.Linear(hidden, units) if units else None
        self.outer = nn.Linear(units or hidden, heads)
        self.mean, self.deviation = scale(states.float())
        self.to(states.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., tokens, hidden]` -> `[..., tokens, kv_heads]`."""
        states = (hidden.float() - self.mean) / self.deviation
        if self.inner is not None:
            states = nn.functional.gelu(self.inner(states))
        marks: Tensor = self.outer(states)
        return marks

    def layer(self) -> GateLayer:
        """The same for `gate:FILE`."""
        first = self.outer if self.inner is None else self.inner
        weights = (first.weight.detach() / self.deviation).contiguous()
        offset = first.bias.detach() - weights @ self.mean
        if self.inner is None:
            return GateLayer(weights, offset)
        return GateLayer(self.outer.weight.detach().clone(), self.outer.bias.detach().clone(), weights, offset)


def scale(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each number; of one that hardly varies 1, so that it is not blown up."""
    deviation = hidden.std(0, unbiased=False)
    return hidden.mean(0), torch.where(deviation > 1e-6, deviation, 1.0)
