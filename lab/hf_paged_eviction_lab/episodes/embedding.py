"""A vector for each part of a conversation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: From texts, as ids `[n]` int64 each (at least one), to vectors `[texts, dim]`.
Embed = Callable[[Sequence[Tensor]], Tensor]


class HiddenStates:
    """The mean of a model's own hidden states over the tokens of a text, which is read on its own.

    Args:
        model: a decoder, or any model that returns `hidden_states`.
        layer: whose output, counted as `hidden_states` is: 0 = the input embeddings, -1 = the last layer. None = the
            one in the middle, where hidden states tell most about meaning and least about the next token.
    """

    def __init__(self, model: Any, layer: int | None = None) -> None:
        self.model = model
        self.layer = layer

    @torch.no_grad()
    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        device = self.model.get_input_embeddings().weight.device
        vectors = []
        for ids in texts:
            states = self.model(
                input_ids=ids[None].to(device), use_cache=False, output_hidden_states=True
            ).hidden_states
            layer = len(states) // 2 if self.layer is None else self.layer
            vectors.append(states[layer][0].float().mean(0))
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
        self._ids, counts = torch.unique(torch.cat([*id_sets, torch.empty(0, dtype=torch.int64)]), return_counts=True)
        self._weights = torch.log((1 + len(id_sets)) / counts.float())

    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        return torch.stack([self._of(torch.as_tensor(ids).cpu()) for ids in texts])

    def _of(self, ids: Tensor) -> Tensor:
        places = torch.searchsorted(self._ids, ids).clamp_max(max(len(self._ids) - 1, 0))
        counted = places[self._ids[places] == ids] if len(self._ids) else places[:0]
        return torch.log1p(torch.bincount(counted, minlength=len(self._ids)).float()) * self._weights
