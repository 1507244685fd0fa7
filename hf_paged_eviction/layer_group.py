"""The paged layers of a cache, which choose their victims together."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .merged_table import MergedTable
from .storage import gather_slots

if TYPE_CHECKING:
    from .layer import PagedLayer


class LayerGroup:
    """Chooses victims once for all layers that are equally far and equally large, instead of layer by layer.

    All layers end a step before the first of them begins the next, so the first one that needs a victim may choose
    for all. Layers that differ choose for themselves.

    Args:
        layers: of one cache, in the order of the model.
    """

    def __init__(self, layers: "Sequence[PagedLayer]") -> None:
        self.layers = list(layers)
        # By the layers that were alike: with budgets of several sizes there are several such sets.
        self._merged: dict[tuple[int, ...], MergedTable] = {}

    def choose_victims(self, layer: "PagedLayer", real: Tensor | None) -> None:
        """Choose the next block that `layer` overwrites, and those of all layers like it.

        Args:
            real: `[B, 1]` bool, rows whose next token is no pad; None = all rows.
        """
        alike = tuple(index for index, other in enumerate(self.layers) if layer.turns_with(other))
        if len(alike) < 2:
            layer.table.choose_victims(layer.score_slots, real)
        else:
            together = [self.layers[index] for index in alike]
            self._merge(alike).choose_victims(score_together(together), real)

    def _merge(self, alike: tuple[int, ...]) -> MergedTable:
        tables = [self.layers[index].table for index in alike]
        merged = self._merged.get(alike)
        if merged is None or not merged.serves(tables):
            merged = self._merged[alike] = MergedTable(tables)
        return merged


def score_together(layers: "Sequence[PagedLayer]") -> Callable[[Tensor | None], Tensor]:
    """The `score_slots` of alike layers as one: rows are those of all layers, layer by layer."""
    first = layers[0]

    def one_by_one(slots: Tensor | None) -> Tensor:
        parts = [None] * len(layers) if slots is None else slots.split(first.table.rows)
        return torch.cat([layer.score_slots(part) for layer, part in zip(layers, parts, strict=True)])

    def at_once(slots: Tensor | None) -> Tensor:
        if slots is None:
            return one_by_one(None)
        parts = slots.split(first.table.rows)
        return first.score_alike(
            torch.cat([gather_slots(layer.storage[0], part) for layer, part in zip(layers, parts, strict=True)]),
            torch.cat([gather_slots(layer.storage[1], part) for layer, part in zip(layers, parts, strict=True)]),
            torch.cat([layer.table.positions.gather(-1, part) for layer, part in zip(layers, parts, strict=True)]),
            torch.cat([layer.table.seen - layer.table.pads for layer in layers]),
        )

    alike = first.policy.token_local and not first.policy.by_layer
    return at_once if alike and all(layer.rotary is first.rotary for layer in layers) else one_by_one
