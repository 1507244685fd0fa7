"""Random texts, and the calls that feed them to a model."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .report import CallNames

BLOCK_SIZE = 4
#: `(start, stop)` columns of each forward.
Calls = tuple[tuple[int, int], ...]
#: Sizes of chunks, in turn; none divides a block, and one is a single token.
_CHUNKS = (11, 7, 9, 5, 13, 3, 1, 7)
#: Steps after a prompt in one forward, and after a beginning that fits into the budget.
_FEW, _MANY = 6, 22


@dataclass(frozen=True)
class Text:
    """Three rows of random ids, left-padded: `ids` and `mask` are `[rows, length]` int64, 1 = real token."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, model: Any, length: int, seed: int) -> "Text":
        """The columns of the pads hold ordinary ids too, so that it shows when somebody looks at them."""
        usable = _plain_ids(model)
        ids = usable[torch.randint(len(usable), (3, length), generator=torch.Generator().manual_seed(seed))]
        ids = ids.to(embeddings(model).device)
        return cls(ids, torch.ones_like(ids))

    @property
    def length(self) -> int:
        """Columns, pads included."""
        return self.ids.shape[1]

    @property
    def pads(self) -> list[int]:
        """Per row."""
        return [int(count) for count in (self.length - self.mask.sum(-1)).tolist()]

    @property
    def positions(self) -> Tensor:
        """`[rows, length]` position ids as `generate` makes them: pads do not count."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def alone(self, row: int) -> "Text":
        """One row without its pads."""
        start = self.pads[row]
        return Text(self.ids[row : row + 1, start:], self.mask[row : row + 1, start:])

    def padded(self, *pads: int) -> "Text":
        """The same ids, of which so many are pads in the second and in the third row; none if no number is given."""
        mask = torch.ones_like(self.mask)
        for row, count in enumerate(pads, 1):
            mask[row, :count] = 0
        return Text(self.ids, mask)


def embeddings(model: Any) -> Tensor:
    """Weights of the token embeddings, `[ids, dim]`.

    Raises:
        TypeError: the model has none.
    """
    try:
        return model.get_input_embeddings().weight  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError) as error:
        raise TypeError(
            f"{type(model).__name__} is not a language model of transformers: it has no token embeddings."
        ) from error


def _plain_ids(model: Any) -> Tensor:
    """Ids that stand for no image, no end of text and the like: vocabularies keep these at both ends, and what a
    configuration calls `..._token_id` anywhere."""
    text = model.config.get_text_config(decoder=True)
    size = int(getattr(text, "vocab_size", None) or len(embeddings(model)))
    special: set[Any] = set()
    for name, value in [*vars(model.config).items(), *vars(text).items()]:
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            special.update(value if isinstance(value, list) else [value])
    usable = [number for number in range(size // 8, size - size // 4) if number not in special]
    return torch.tensor(usable or list(range(size)))


def text_length(budget: int) -> int:
    """Columns of the text for a budget: even half of them exceed it."""
    return 2 * budget + 4 * BLOCK_SIZE


def calls_of(name: CallNames, length: int, budget: int) -> Calls:
    """How a text of `length` columns is fed."""
    scale = max(length // sum(_CHUNKS), 1)
    chunks = [size * scale if size > 1 else 1 for size in _CHUNKS]
    sizes = {
        "one forward": [length - _FEW, *[1] * _FEW],
        "steps": [budget - 5, *[1] * _MANY],  # from a cache with room left to one that evicts at every token
        "chunks": [*chunks, length - sum(chunks)],
    }
    stops = list(accumulate(sizes[name]))
    return tuple((stop - size, stop) for size, stop in zip(sizes[name], stops, strict=True) if size)


def text_of(name: CallNames, text: Text, budget: int) -> Text:
    """With pads: the third row is half as long, or loses less where `generate` would feed a pad as a single token."""
    return text.padded(7, budget - 8 if name == "steps" else text.length // 2 + 1)


def whole(length: int) -> Calls:
    """Everything in one forward."""
    return ((0, length),)


def without(calls: Calls, pads: int) -> Calls:
    """The same calls for a row alone: its forwards end at the same tokens, and those of pads only are left out."""
    return tuple((max(start - pads, 0), stop - pads) for start, stop in calls if stop > pads)


def row_alone(calls: Calls, text: Text) -> int:
    """The row to be looked at alone: the one with the most pads whose forwards stay forwards of several tokens.

    A single token is treated differently: it overwrites at once, where several are trimmed together.
    """
    pads = text.pads[2]
    cut = any(stop - start > 1 and stop - pads == 1 for start, stop in calls)
    return 1 if cut or calls[-1][1] - pads <= len(calls) else 2
