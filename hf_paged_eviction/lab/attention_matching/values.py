"""Values of some tokens of one head, such that attention to these gives what attention to all gave."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.weights import Logits

#: Logits that exist at one time, in bytes: many queries are worked out in pieces of this size.
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Head:
    """One KV head of a row.

    Attributes:
        keys, values: `[tokens, dim]` float32, all of them.
        kept: `[t]` int64, which of them stay.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor


def fitted_values(head: Head, queries: Iterable[Tensor], logits: Logits, ridge: float) -> Tensor:
    """The values `[t, dim]` float32 with the least squared error of outputs, and a ridge towards what they were.

    The normal equations are summed up over pieces of the queries and solved in float64.

    Args:
        queries: `[n, dim]` each, of all query heads of the group.
        ridge: see `compress_by_matching`.
    """
    kept, dim = len(head.kept), head.values.shape[1]
    values = head.values[head.kept]
    gram = ridge * torch.eye(kept, dtype=torch.float64, device=values.device)
    right = torch.zeros(kept, dim, dtype=torch.float64, device=values.device)
    size = max(1, _PIECE // (4 * len(head.keys)))
    for chunk in queries:
        for piece in chunk.split(size):
            products = _logits(piece, head.keys, logits)
            paid = products[:, head.kept].softmax(-1)
            missing = products.softmax(-1) @ head.values - paid @ values
            gram += (paid.mT @ paid).double()
            right += (paid.mT @ missing).double()
    return values + torch.cholesky_solve(right, torch.linalg.cholesky(gram)).float()


def _logits(queries: Tensor, keys: Tensor, logits: Logits) -> Tensor:
    products = (queries * logits.scaling) @ keys.mT
    return products if logits.softcap is None else (products / logits.softcap).tanh() * logits.softcap
