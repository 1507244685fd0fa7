"""Random texts, and the calls that feed them to a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .report import CallNames

#: `(start, stop)` columns of each forward.
Calls = tuple[tuple[int, int], ...]

#: Sizes of chunks, in turn; none divides a block, and one is a single token.
_CHUNKS = (11, 7, 9, 5, 13, 3, 1, 7)
#: Steps after a prompt in one forward, and after a beginning that fits into the budget.
_FEW, _MANY = 6, 22


@dataclass(frozen=True)
class Text:
    """Token ids of several rows, left-padded.

    Attributes:
        ids: `[rows, length]` int64.
        mask: `[rows, length]` int64, 1 = real token.
    """

    ids: Tensor
    mask: Tensor

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

    def padded(self, most: int) -> "Text":
        """The same ids with no pad in the first row, seven in the second, and `most` in the third."""
        mask = torch.ones_like(self.mask)
        mask[1, :7] = mask[2, :most] = 0
        return Text(self.ids, mask)

    def unpadded(self) -> "Text":
        """The same ids, with tokens in place of the pads."""
        return Text(self.ids, torch.ones_like(self.mask))


def draw_text(model: Any, length: int, seed: int) -> Text:
    """Three rows of random ids: the first full, one that lacks a few tokens, one that is half as long.

    The columns of the pads hold ordinary ids too, so that it shows when somebody looks at them.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = _plain_ids(model)
    ids = usable[torch.randint(len(usable), (3, length), generator=generator)]
    ids = ids.to(embeddings(model).device)
    return Text(ids, torch.ones_like(ids)).padded(length // 2 + 1)


def embeddings(model: Any) -> Tensor:
    """Weights of the token embeddings, `[ids, dim]`.

    Raises:
        TypeError: the model has none.
    """
    try:
        return model.get_input_embeddings().weight  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError) as error:
        raise TypeError(f"{type(model).__name__} is no language model of transformers: no token embeddings.") from error


def _plain_ids(model: Any) -> Tensor:
    """Ids that stand for no image, no end of text and the like.

    Vocabularies keep their reserved ids at both ends, and what a configuration calls `..._token_id` anywhere.
    """
    text = model.config.get_text_config(decoder=True)
    size = int(getattr(text, "vocab_size", None) or len(embeddings(model)))
    special = {number for config in (model.config, text) for number in _special(vars(config))}
    usable = [number for number in range(size // 8, size - size // 4) if number not in special]
    return torch.tensor(usable or list(range(size)))


def _special(settings: dict[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


def text_length(budget: int, block_size: int) -> int:
    """Columns of the text for a budget: even half of them exceed it."""
    return 2 * budget + 4 * block_size


def calls_of(name: CallNames, length: int, budget: int) -> Calls:
    """How a text of `length` columns is fed."""
    if name == "one forward":
        return _cut([length - _FEW, *[1] * _FEW])
    if name == "steps":  # from a cache with room left to one that evicts at every token
        return _cut([_beginning(budget), *[1] * _MANY])
    scale = max(length // sum(_CHUNKS), 1)
    sizes = [size * scale if size > 1 else 1 for size in _CHUNKS]
    left = length - sum(sizes)
    return _cut([*sizes, left] if left else sizes)


def text_of(name: CallNames, text: Text, budget: int) -> Text:
    """The text for these calls: `generate` never feeds a pad as a single token."""
    return text.padded(_beginning(budget) - 3) if name == "steps" else text


def _beginning(budget: int) -> int:
    return budget - 5


def whole(length: int) -> Calls:
    """Everything in one forward."""
    return ((0, length),)


def _cut(sizes: Sequence[int]) -> Calls:
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return tuple((stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


def without(calls: Calls, pads: int) -> Calls:
    """The same calls for a row alone: its forwards end at the same tokens, and those of pads only are left out."""
    return tuple((max(start - pads, 0), stop - pads) for start, stop in calls if stop > pads)


def row_alone(calls: Calls, text: Text) -> int:
    """The row to be looked at alone: the one with the most pads whose forwards stay forwards of several tokens.

    A single token is treated differently: it overwrites at once, where several are trimmed together.
    """
    for row in (2, 1):
        pads = text.pads[row]
        if not any(stop - start > 1 and stop - pads == 1 for start, stop in calls) and calls[-1][1] - pads > len(calls):
            return row
    return 1
