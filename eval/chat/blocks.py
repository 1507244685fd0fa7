"""Which tokens are held, and what the policy thinks of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.paged import PagedLayer

from ..errors import UserError

_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"
#: By the rank of a block's score, lowest first.
_COLOURS = ("red", "yellow", "cyan", "green")
_PROTECTED = "blue"
_LABEL = 10


@dataclass(frozen=True)
class LayerBlocks:
    """The blocks of a layer as they are now, on the CPU.

    Attributes:
        positions: `[kv_heads, blocks, block_size]` int64, -1 where no token is.
        scores: `[kv_heads, blocks]` float32, nan where there is none yet.
        protected: `[kv_heads, blocks]` bool: not evicted now, the protected start and the newest tokens.
    """

    index: int
    positions: Tensor
    scores: Tensor
    protected: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, index: int, layer: PagedLayer) -> LayerBlocks:
        """Read a layer that has seen something."""
        positions, scores = layer.block_table()[0].cpu().clone(), layer.block_scores()[0].cpu().clone()
        first = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max).amin(-1)
        newest, sizes = positions.amax(-1), layer.budget
        recent = sizes.recent if sizes.recent > sizes.block_size else 1  # the newest block in any case
        protected = (first < sizes.protected) | (newest > newest.amax(-1, keepdim=True) - recent)
        return cls(index, positions, scores, protected)


class BlockMap:
    """A strip per layer: from left to right the conversation, as high as the share of its tokens that are held.

    Args:
        most: layers that are shown, from the first to the last.
    """

    def __init__(self, cache: PagedEvictionCache, most: int | None = None) -> None:
        self._seen: int = cache.get_seq_length()
        if not self._seen:
            raise UserError("/blocks: nothing was read yet, write a message first")
        layers = cache.paged_layers
        if most is not None and most < len(layers):
            layers = [layers[at * (len(layers) - 1) // max(1, most - 1)] for at in range(most)]
        self._layers = [LayerBlocks.of(index, layer) for index, layer in layers]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(8, min(self._seen, options.max_width - _LABEL))
        bars = _ASCII_BARS if options.ascii_only else _BARS
        for layer in self._layers:
            yield Text(f"layer {layer.index}".ljust(_LABEL)) + strip(layer, self._seen, width, bars)
        last = f"{self._seen - 1:,}"
        yield Text(f"{'':{_LABEL}}0{last:>{max(len(last) + 1, width - 1)}}", style="dim")
        yield _legend(coloured=console.color_system is not None and not console.no_color)


def _legend(*, coloured: bool) -> Text:
    text = Text("height: share of the tokens that is held", style="dim")
    if not coloured:
        return text
    text.append("; blocks: ")
    for colour, meaning in ((_COLOURS[0], "lowest score"), (_COLOURS[-1], "highest"), (_PROTECTED, "protected")):
        text.append(meaning, style=colour).append(", ")
    return text.append("plain: not scored yet")


def strip(layer: LayerBlocks, seen: int, width: int, bars: str) -> Text:
    """`width` characters for `seen` tokens of a layer."""
    positions = layer.positions.flatten()
    held = positions >= 0
    columns = (positions * width // seen).clamp(min=0)
    ranks = _ranks(layer)[..., None].expand_as(layer.positions).flatten()

    def per_column(weights: Tensor) -> Tensor:
        return torch.zeros(width, dtype=torch.float64).index_add_(0, columns, weights.double() * held)

    tokens = torch.bincount(torch.arange(seen) * width // seen, minlength=width) * len(layer.positions)
    count = per_column(held)
    scored = ranks.isfinite()
    mean_rank = per_column(ranks.masked_fill(~scored, 0.0)) / per_column(scored)
    guarded = per_column(ranks.isinf()) * 2 > count
    text, most = Text(), len(bars) - 1
    share = count / tokens.clamp(min=1)
    for high, rank, safe in zip(share.tolist(), mean_rank.tolist(), guarded.tolist(), strict=True):
        colour = "" if rank != rank else _COLOURS[min(len(_COLOURS) - 1, int(rank * len(_COLOURS)))]
        text.append(bars[min(most, max(round(high * most), int(high > 0)))], style=_PROTECTED if safe else colour)
    return text


def _ranks(layer: LayerBlocks) -> Tensor:
    """`[kv_heads, blocks]` float64 in [0, 1): the place of a block's score among those of its head that may go.

    inf for protected blocks, nan where there is no score.
    """
    ranks = torch.full(layer.scores.shape, float("nan"), dtype=torch.float64)
    for head, (scores, protected) in enumerate(zip(layer.scores, layer.protected, strict=True)):
        free = (~scores.isnan() & ~protected).nonzero()[:, 0]
        ranks[head, free] = scores[free].argsort(stable=True).argsort().double() / max(1, len(free))
        ranks[head, protected] = float("inf")
    return ranks
