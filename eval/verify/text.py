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
        """Draw a text. Pads are ordinary ids, too, so that attention to a pad changes the result."""
        usable = _plain_ids(model)
        ids = usable[
            torch.randint(len(usable), (3, length), generator=torch.Generator().manual_seed(seed), device="cpu")
        ]
        ids = ids.to(embeddings(model).device)
        return cls(ids, torch.ones_like(ids))

    @property
    def length(self) -> int:
        """Number of columns, pads included."""
        return self.ids.shape[1]

    @property
    def pads(self) -> list[int]:
        """Number of pads per row."""
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
        """The same ids with these numbers of pads in the second and the third row; without arguments, no pads."""
        mask = torch.ones_like(self.mask)
        for row, count in enumerate(pads, 1):
            mask[row, :count] = 0
        return Text(self.ids, mask)


def embeddings(model: Any) -> Tensor:
    """The weights of the token embeddings, `[ids, dim]`.

    Raises:
        TypeError: the model has no token embeddings.
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
    return torch.tensor(usable or list(range(size)), device="cpu")


def text_length(budget: int) -> int:
    """Number of columns of the text for a budget; half of them exceed it."""
    return 2 * budget + 4 * BLOCK_SIZE


def calls_of(name: CallNames, length: int, budget: int) -> Calls:
    """The calls that feed a text of `length` columns."""
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
    """A text with pads: the third row is half as long, or longer if a call would feed a pad as a single token."""
    return text.padded(7, budget - 8 if name == "steps" else text.length // 2 + 1)


def whole(length: int) -> Calls:
    """Everything in one forward."""
    return ((0, length),)


def without(calls: Calls, pads: int) -> Calls:
    """The same calls for a row without its pads: forwards end at the same tokens, and forwards of pads only are left
    out."""
    return tuple((max(start - pads, 0), stop - pads) for start, stop in calls if stop > pads)


def row_alone(calls: Calls, text: Text) -> int:
    """The row for the comparison with the row alone: the one with the most pads whose forwards still have several
    tokens.

    The cache treats a single token differently: it overwrites a slot at once, while several tokens are evicted
    together.
    """
    pads = text.pads[2]
    cut = any(stop - start > 1 and stop - pads == 1 for start, stop in calls)
    return 1 if cut or calls[-1][1] - pads <= len(calls) else 2
