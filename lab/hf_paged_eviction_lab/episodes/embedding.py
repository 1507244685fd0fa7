"""A vector for each part of a conversation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: From texts, as ids `[n]` int64 each (at least one), to vectors `[texts, dim]`.
Embed = Callable[[Sequence[Tensor]], Tensor]


class HiddenStates:
    """The mean of a model's own hidden states over the tokens of a text, which is read on its own.

    They are those of the layer in the middle, which tell most about meaning and least about the next token.

    Args:
        model: a decoder, or any model that returns `hidden_states`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        device, vectors = self.model.get_input_embeddings().weight.device, []
        for ids in texts:
            read = self.model(input_ids=ids[None].to(device), use_cache=False, output_hidden_states=True)
            vectors.append(read.hidden_states[len(read.hidden_states) // 2][0].float().mean(0))
        return torch.stack(vectors)


class RareTokens:
    """Which tokens of a conversation a text has, the rare ones counting most (tf-idf): needs no model.

    A question goes where its own words were said. It knows no synonyms, so a model made for embeddings does better on
    questions in other words; hidden states of small models tell less than this.

    Args:
        turns: of the conversation, ids `[n]` int64 each.
    """

    def __init__(self, turns: Sequence[Tensor]) -> None:
        id_sets = [torch.unique(torch.as_tensor(turn).cpu()) for turn in turns if len(turn)]
        counts = torch.bincount(torch.cat(id_sets))
        self._size, self._ids = len(counts), counts.nonzero()[:, 0]
        self._weights = torch.log((1 + len(id_sets)) / counts[self._ids].float())

    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        known = [ids.cpu()[ids.cpu() < self._size] for ids in map(torch.as_tensor, texts)]
        counts = torch.stack([torch.bincount(ids, minlength=self._size)[self._ids] for ids in known])
        return torch.log1p(counts.float()) * self._weights
