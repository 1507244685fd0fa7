"""A conversation as ids, cut into segments of a few turns."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: A turn, or any other text: a list of ids, or a tensor `[n]` or `[1, n]`.
Ids = Sequence[int] | Tensor


def as_ids(name: str, tokens: Ids) -> Tensor:
    """`[n]` int64 on the CPU.

    Raises:
        TypeError: a text that is not encoded yet. ValueError: several rows, or numbers that are no ids.
    """
    if isinstance(tokens, str):
        raise TypeError(f"{name} must be token ids, got a text: encode it with the model's tokenizer first.")
    ids = torch.as_tensor(tokens).cpu()
    if not ids.ndim or ids.numel() != ids.shape[-1]:
        raise ValueError(f"{name} must be the ids of one text without pads, [n], got shape {list(ids.shape)}.")
    ids = ids.flatten()
    if len(ids) and (ids.is_floating_point() or bool((ids < 0).any())):
        raise ValueError(f"{name} must be token ids, whole numbers from 0 on.")
    return ids.long()


def segment(turns: Sequence[Ids], size: int) -> list[Tensor]:
    """Groups of `size` consecutive turns. Turns without a token count as none.

    Raises:
        TypeError, ValueError: these are no ids, or no turn has a token.
    """
    nonempty = [ids for ids in (as_ids(f"turns[{at}]", turn) for at, turn in enumerate(turns)) if len(ids)]
    if not nonempty:
        raise ValueError(f"There is nothing to read: none of the {len(turns)} turns has a token.")
    return [torch.cat(nonempty[start : start + size]) for start in range(0, len(nonempty), size)]
