"""Where the queries of each head lie before rotary embedding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...integration.feeding import feed
from ...integration.model_rotary import layer_rotaries
from ...integration.models import is_latent_attention, paged_layers
from ...integration.rotary import Rotary
from ...learned.calibration.calibration import fingerprint
from ...naming.files import NamedFiles
from ...naming.fitted import FittedFiles, Tensors
from ...naming.tensors import FileKind
from ...queries.bystander import Bystander, OverheardCache
from ...queries.observer import Queries
from ...recipes.fit.calibration import Progress, Window, watched


@dataclass(frozen=True)
class Centres:
    """Of all layers of a model that evict.

    Attributes:
        layers: by index, "mean" `[kv_heads, group, head_dim]` of the queries before rotation, and "length" `[kv_heads,
            group, width]`, for each channel that turns the mean length of the pair that it belongs to.
        model: see `calibration.fingerprint`.
        facts: what they were found in.
    """

    layers: Tensors
    model: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)


class _Sums(Bystander):
    """Adds up the queries of one layer."""

    def __init__(self, layer_idx: int, rotary: Rotary) -> None:
        super().__init__(layer_idx)
        self.rotary, self.count, self.places = rotary, 0, torch.empty(0)
        self.mean: Tensor | float = 0.0
        self.length: Tensor | float = 0.0

    def attended(self, queries: Queries) -> None:
        """See `Bystander.attended`."""
        states = self.rotary.unrotate(queries.query, self.places[:, None]).transpose(0, 1)[:, self.places >= 0]
        states = states.double().unflatten(0, (queries.key.shape[1], -1))
        self.count += states.shape[2]
        self.mean = self.mean + states.sum(2)
        self.length = self.length + self.rotary.pair_lengths(states).sum(2)


def find_centres(model: Any, windows: Sequence[Window], progress: Progress = lambda tokens: None) -> Centres:
    """Let a model read some text, and note where its queries lie.

    Raises:
        ValueError: a model that caches latents, has no layer that evicts or none that rotates; no text.
    """
    if is_latent_attention(model.config):
        raise ValueError("This model caches latents instead of keys and values (MLA): it has no such queries.")
    paged = paged_layers(model.config)
    rotaries = layer_rotaries(model.config, paged)
    sums = {index: _Sums(index, rotary) for index, rotary in rotaries.items() if rotary is not None}
    if not sums or not windows:
        raise ValueError("No layer of this model evicts and rotates its keys, or there is no text to read.")
    with watched(model), torch.inference_mode():
        for window in windows:
            real = torch.ones_like(window.tokens) if window.mask is None else window.mask
            for each in sums.values():
                each.places = (real.cumsum(-1) - 1).masked_fill(real == 0, -1)
            feed(model, window.tokens, window.mask, OverheardCache(model.config, sums))
            progress(window.count)
    found = {
        index: {"mean": (each.mean / each.count).float().cpu(), "length": (each.length / each.count).float().cpu()}
        for index, each in sums.items()
        if isinstance(each.mean, Tensor) and isinstance(each.length, Tensor)
    }
    tokens = sum(window.count for window in windows)
    return Centres(found, fingerprint(model.config), {"tokens": str(tokens)})


def _made(layers: Tensors, said: dict[str, Any]) -> Centres:
    if any({"mean", "length"} != parts.keys() for parts in layers.values()):
        raise ValueError("a layer has something else than a mean and lengths")
    return Centres(layers, said["model"], said["facts"])


_FILES = FittedFiles(
    FileKind("query_centres"),
    NamedFiles("No query centres", "hf_paged_eviction.lab.triattention.find_centres"),
    _made,
    "query centres",
)
load_centres = _FILES.load


def save_centres(centres: Centres, path: str | Path) -> None:
    """Write them; `load_centres` reads them back bit by bit."""
    _FILES.save(path, centres.layers, centres.model, centres.facts)
