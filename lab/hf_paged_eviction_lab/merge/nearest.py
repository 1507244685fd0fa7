"""Which of the tokens that stay is most like one that leaves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged_eviction.internals import DROP

# A cosine in whole steps, so that the last bit of a product does not decide: equal keys are equally alike.
_LEVELS = 4096


@dataclass(frozen=True)
class Nearest:
    """Of each token that leaves.

    Attributes:
        index: `[B, H, n]` int64, the token that is most like it; any if there is none.
        similarity: `[B, H, n]` float32, the cosine of the keys in steps of 1/4096; 0 if there is none.
        exists: `[B, H, n]` bool, whether there is one.
    """

    index: Tensor
    similarity: Tensor
    exists: Tensor


def nearest(keys: Tensor, kept_keys: Tensor, places: Tensor) -> Nearest:
    """The search for tokens `keys` `[B, H, n, D]` among `kept_keys` `[B, H, m, D]`.

    Args:
        places: `[B, 1 or H, m]` int64, the higher goes first of equally alike ones; -1 for what is no candidate, whose
            key may be anything.
    """
    keys, kept_keys = keys.float(), kept_keys.float()
    tiny = torch.finfo(torch.float32).tiny
    lengths = kept_keys.norm(dim=-1).clamp_min(tiny)[..., None, :]
    products = (keys / keys.norm(dim=-1, keepdim=True).clamp_min(tiny)) @ kept_keys.mT / lengths
    levels = (products.nan_to_num(nan=-1.0) * _LEVELS).round()
    place = places[..., None, :]
    best, index = (levels.to(torch.int64) * 2**32 + place).masked_fill(place < 0, DROP).max(-1)
    exists = best > DROP
    similarity = levels.gather(-1, index[..., None])[..., 0] / _LEVELS
    return Nearest(index, similarity.masked_fill(~exists, 0.0), exists)
