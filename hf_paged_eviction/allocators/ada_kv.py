"""Ada-KV, arXiv 2407.11550."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..policies.checks import check_between
from .base import HeadAllocator
from .registry import register_allocator


@register_allocator("ada_kv")
@dataclass(frozen=True)
class AdaKV(HeadAllocator):
    r"""Gives a KV head as many tokens as it has among the layer's best ones, mixed with an equal share.

    .. math::

        b_h \propto (1 - f) n_h + f \bar n, \quad
        n_h \text{ of the layer's best tokens in head } h, \; f = \text{floor}

    `n` is the number of tokens of head `h` among the highest scores of the layer, its mean is the equal share, and `f`
    is `floor`. Scores of different heads are compared directly, so the policy's scores should mean the same in every
    head, as attention does. From arXiv 2407.11550.

    Args:
        floor: weight of the equal share, 0 to 1. The authors advise 0.2 where query heads share KV heads; their readme
            has 0.5.

    Raises:
        ValueError: a parameter is out of range.
    """

    paper: ClassVar[str | None] = "2407.11550"

    floor: float = 0.2

    def __post_init__(self) -> None:
        check_between("floor", self.floor, 0, 1)

    def weights(self, scores: Tensor, budget: int) -> Tensor:
        heads, tokens = scores.shape[1:]
        best = scores.flatten(1).topk(min(heads * budget, heads * tokens), dim=-1).indices // tokens
        counts = torch.zeros(len(scores), heads, device=scores.device)
        counts.scatter_add_(1, best, torch.ones_like(best, dtype=counts.dtype))
        return (1 - self.floor) * counts + self.floor * counts.mean(-1, keepdim=True)
