"""The state that takes tokens in, and what a query reads in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged_eviction.internals import Read


@dataclass(frozen=True)
class FoldedState:
    """Sums over all tokens that were taken in, of `H` KV heads.

    Attributes:
        values: `[B, H, R, D]` float32, of features times values.
        mass: `[B, H, R]` float32, of features.
        kernels: digest of the maps that the features are of.
    """

    values: Tensor
    mass: Tensor
    kernels: str


def read_state(features: Tensor, values: Tensor, mass: Tensor) -> Read:
    """What queries read in a state.

    Args:
        features: `[B, Q, q, R]` of the queries.
        values, mass: see `FoldedState`.
    """
    grouped = features.unflatten(1, (mass.shape[1], -1))  # [B, H, G, q, R]
    weight = (grouped * mass[:, :, None, None]).sum(-1)
    return _read(grouped @ values[:, :, None], weight)


def read_tokens(asking: Tensor, keys: Tensor, values: Tensor, folded: Tensor) -> Read:
    """What queries read in a state of the tokens that each finds there: the sums, token by token, to be learned from.

    Args:
        asking: `[B, Q, q, R]` features of queries.
        keys: `[B, H, n, R]` features of keys.
        values: `[B, H, n, D]`.
        folded: `[B, H, q, n]` bool.
    """
    products = (asking.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT) * folded[:, :, None]
    return _read(products @ values[:, :, None], products.sum(-1))


def _read(sums: Tensor, weight: Tensor) -> Read:
    # Where nothing was folded all sums are 0, and the logarithm of the weight says that there is nothing to see.
    output = sums / weight.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return Read(output.flatten(1, 2), weight.log().flatten(1, 2))
