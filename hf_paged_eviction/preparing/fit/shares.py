"""Learn the shares of heads from the scores of all tokens of some texts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...learned.shares import HeadShares

#: Shares of the tokens for which a table is learned.
KEPT = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
#: Smallest number of tokens of a window that a head counts for.
_LEAST = 4


def learn_shares(scores: Mapping[int, Sequence[Tensor]]) -> HeadShares:
    """Learn the shares that one threshold over all layers and heads leaves to each head, on average over texts.

    Args:
        scores: by layer, `[kv_heads, tokens]` for each text; they must be comparable across layers and heads.
    """
    layers = sorted(scores)
    sizes = [scores[index][0].shape[0] for index in layers]
    tables = []
    for kept_share in KEPT:
        total = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        for parts in zip(*(scores[index] for index in layers), strict=True):
            text = torch.cat(list(parts)).float()
            threshold = text.flatten().topk(max(int(text.numel() * kept_share), 1)).values[-1]
            above = (text >= threshold).sum(-1).double().clamp_min(_LEAST)
            total += above / above.mean()
        tables.append((total / total.mean()).split(sizes))
    by_layer = {index: torch.stack([table[at] for table in tables]).float() for at, index in enumerate(layers)}
    return HeadShares(KEPT, by_layer)
