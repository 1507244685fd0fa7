"""A conversation as ids, cut into segments of a few turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: A turn, or any other text: a list of ids, or a tensor `[n]`.
Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class Segmented:
    """A conversation.

    Attributes:
        system: `[n]` int64, what stands before the first turn; may be empty.
        segments: `[n]` int64 each, none empty; behind `system` they are the whole text.
    """

    system: Tensor
    segments: list[Tensor]

    @property
    def text(self) -> Tensor:
        """`[1, length]`, all of it."""
        return torch.cat([self.system, *self.segments])[None]


def as_ids(name: str, tokens: Ids) -> Tensor:
    """`[n]` int64 on the CPU.

    Raises:
        TypeError: a text that is not encoded yet. ValueError: several rows, or numbers that are no ids.
    """
    if isinstance(tokens, str):
        raise TypeError(f"{name} must be token ids, got a text: encode it with the model's tokenizer first.")
    ids = torch.as_tensor(tokens).cpu()
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(
            f"{name} must be the ids of one text without pads, [n], got shape {list(ids.shape)}: episodes are of one "
            "conversation, so call this once for each."
        )
    if len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool or bool((ids < 0).any())):
        raise ValueError(f"{name} must be token ids, whole numbers from 0 on.")
    return ids.long()


def segment(turns: Sequence[Ids], system: Ids, size: int) -> Segmented:
    """Groups of `size` consecutive turns. Turns without a token count as none.

    Raises:
        TypeError, ValueError: these are no ids, or no turn has a token.
    """
    if isinstance(turns, str | Tensor):
        raise TypeError("turns must be a list with the ids of each turn, not one text or tensor.")
    nonempty = [as_ids(f"turns[{at}]", turn) for at, turn in enumerate(turns)]
    nonempty = [ids for ids in nonempty if len(ids)]
    if not nonempty:
        raise ValueError(f"There is nothing to read: none of the {len(turns)} turns has a token.")
    groups = [torch.cat(nonempty[start : start + size]) for start in range(0, len(nonempty), size)]
    return Segmented(as_ids("system", system), groups)
