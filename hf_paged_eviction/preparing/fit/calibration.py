"""Fit a calibration: the model reads windows of text, and a linear system is solved from running sums.

There are three passes over the keys and values of all windows, because each needs the result of the one before: the
mean key and value, the sums of the normal equations, the curve and the correlations.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...integration.model_rotary import known_rotaries
from ...integration.models import is_latent_attention, paged_layers
from ...integration.rotary import Rotary
from ...learned.calibration.calibration import Calibration, LayerScore, model_fingerprint
from ...learned.calibration.features import SCALARS, Means, features, unit
from ...learned.calibration.monotone import bend, fit_curve
from ...learned.moments import Line, Moments
from ...queries.attention import PAGED_EVICTION
from ...version import __version__
from .correlation import pearson, spearman
from .future import Seen, Visit, watch
from .shares import learn_shares

#: Nearer tokens do not count, because the cache holds them anyway.
DISTANCE = 64
#: One of this many windows is held out for the check.
HELD_OUT = 4
#: Number of windows for the mean key and value.
_MEAN_WINDOWS = 8
#: What weights cost, see `Moments.solve`. The many components of the unit key cost more than the few numbers that are
#: known to help: on text unlike that of the fit they would otherwise mislead.
_SCALAR_PENALTY, _DIRECTION_PENALTY = 1e-3, 1.0

#: Called after each layer of a forward with the number of tokens that it read, divided by the number of layers.
Progress = Callable[[float], object]


@dataclass(frozen=True)
class Window:
    """A batch of texts.

    Attributes:
        tokens: `[rows, length]` int64.
        mask: `[rows, length]`, 0 for pads on the left; None = no pads.
    """

    tokens: Tensor
    mask: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of real tokens."""
        return self.tokens.numel() if self.mask is None else int(self.mask.sum())


@dataclass(frozen=True)
class LayerReport:
    """How well the score of a layer predicts attention in held-out windows; means over windows.

    Attributes:
        spearman, pearson: `[kv_heads]`, correlation of ranks, and of scores with attention.
        single: absolute Spearman correlation `[kv_heads]` of each feature of `SCALARS` alone.
    """

    spearman: Tensor
    pearson: Tensor
    single: dict[str, Tensor]


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`."""

    calibration: Calibration
    reports: dict[int, LayerReport]


def read_tokens(windows: Sequence[Window]) -> int:
    """Number of tokens that `fit` reads."""
    return sum(window.count for window in windows)


def split(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Split windows into those for the fit and, every fourth one, those for the check.

    Raises:
        ValueError: there are too few windows.
    """
    if len(windows) < 2:
        raise ValueError(f"A calibration needs at least 2 windows of text, one to check with; got {len(windows)}.")
    held_out = [window for index, window in enumerate(windows) if index % HELD_OUT == 1]
    return [window for index, window in enumerate(windows) if index % HELD_OUT != 1], held_out


def fit(model: Any, windows: Sequence[Window], progress: Progress = lambda tokens: None) -> Fitted:
    """Fit a score to the attention of a model in some windows of text.

    The model is restored afterwards; meanwhile its attention implementation is "paged_eviction". The score reads keys
    before rotary embedding, or keys as cached if the model's rotation is not known.

    Args:
        model: a decoder, in evaluation mode.
        windows: any text, some hundred tokens each or more; a few thousand tokens in all are enough.

    Raises:
        ValueError: the model caches latents (MLA) or has no layer that evicts, or there is too little text.
    """
    if is_latent_attention(model.config):
        raise ValueError("This model caches latents instead of keys and values (MLA); no score is known for those.")
    train, held_out = split(windows)
    about = model_fingerprint(model)
    paged = paged_layers(model.config)
    rotaries = known_rotaries(model.config, paged)
    read = _Reading(model, rotaries, progress)
    with watched(model):
        means = _find_means(read, train[:_MEAN_WINDOWS])
        if not means:
            reason = f"No layer of this model can evict, or no window is longer than {DISTANCE} tokens"
            raise ValueError(f"{reason}: there is nothing to calibrate.")
        lines = _fit_lines(read, train, means)
        curves = _Curves(lines, means)
        for window in train:
            read(window, curves.add)
        checks = _Checks(lines, means)
        for window in held_out:
            read(window, checks.add)
    layers = {index: _layer(means[index], line, *curves.fit(index)) for index, line in lines.items()}
    reports = checks.reports()
    facts = _facts(windows, reports)
    shares = learn_shares({index: curves.scores(index, layer) for index, layer in layers.items()})
    return Fitted(Calibration(layers, about, facts, bool(rotaries), shares), reports)


@contextmanager
def watched(model: Any) -> Iterator[None]:
    """Context manager: the model uses the attention implementation "paged_eviction"."""
    with using(model, PAGED_EVICTION):
        yield


@contextmanager
def using(model: Any, implementation: str) -> Iterator[None]:
    """Context manager: the model uses this attention implementation."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    if before == implementation:
        yield
        return
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class _Reading:
    """Lets a model read a window, and visits its layers one by one. Without rotaries, keys are as cached.

    Each window is read once, and the keys and values of its layers are kept.
    """

    model: Any
    rotaries: Mapping[int, Rotary | None]
    progress: Progress
    seen_by_window: dict[int, list[Seen]] = field(default_factory=dict)

    def __call__(self, window: Window, visit: Visit) -> None:
        if id(window) not in self.seen_by_window:
            all_seen: list[Seen] = []
            layers = len(paged_layers(self.model.config))

            def note(seen: Seen) -> None:
                all_seen.append(self._unrotated(seen))
                self.progress(window.count / layers)

            watch(self.model, window.tokens, window.mask, DISTANCE, note)
            self.seen_by_window[id(window)] = all_seen
        for seen in self.seen_by_window[id(window)]:
            visit(seen)

    def _unrotated(self, seen: Seen) -> Seen:
        rotary = self.rotaries.get(seen.layer_idx)
        return seen if rotary is None else replace(seen, keys=rotary.unrotate(seen.keys, seen.positions))


def usable(seen: Seen, values: Tensor) -> Tensor:
    """Select the usable tokens: `[batch, kv_heads, tokens, ...]` -> `[kv_heads, n, ...]`."""
    return values.transpose(0, 1)[:, seen.usable]


# ---- first pass -------------------------------------------------------------------------------------------------


def _find_means(read: _Reading, windows: Sequence[Window]) -> dict[int, Means]:
    sums: dict[int, list[Tensor]] = {}

    def add(seen: Seen) -> None:
        keys, values = usable(seen, unit(seen.keys.double())), usable(seen, seen.values.double())
        if keys.shape[1]:
            count = torch.tensor(keys.shape[1], device=keys.device)
            new = [keys.sum(1), values.sum(1), count]
            old = sums.get(seen.layer_idx)
            sums[seen.layer_idx] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]

    for window in windows:
        read(window, add)
    return {index: Means(unit(key), value / count) for index, (key, value, count) in sums.items()}


# ---- second pass ------------------------------------------------------------------------------------------------


def penalty(key_dim: int) -> Tensor:
    """The penalty of the weight of each feature, `[features]`."""
    return torch.tensor([_SCALAR_PENALTY] * len(SCALARS) + [_DIRECTION_PENALTY] * key_dim, device="cpu")


def _fit_lines(read: _Reading, windows: Sequence[Window], means: dict[int, Means]) -> dict[int, Line]:
    moments = {index: Moments() for index in means}

    def add(seen: Seen) -> None:
        samples = features(seen.keys.float(), seen.values.float(), seen.positions, means[seen.layer_idx])
        moments[seen.layer_idx].add(usable(seen, samples), usable(seen, seen.future))

    for window in windows:
        read(window, add)
    return {index: layer_moments.solve(penalty(means[index].key.shape[1])) for index, layer_moments in moments.items()}


# ---- third pass -------------------------------------------------------------------------------------------------


class _Curves:
    """The scores and targets of all tokens."""

    def __init__(self, lines: dict[int, Line], means: dict[int, Means]) -> None:
        self.lines, self.means = lines, means
        self.samples: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in lines}

    def add(self, seen: Seen) -> None:
        samples = features(seen.keys.double(), seen.values.double(), seen.positions, self.means[seen.layer_idx])
        scores = self.lines[seen.layer_idx](usable(seen, samples))
        self.samples[seen.layer_idx].append((scores.cpu(), usable(seen, seen.future).cpu()))

    def fit(self, index: int) -> tuple[Tensor, Tensor]:
        scores, target = (torch.cat(parts, dim=1) for parts in zip(*self.samples[index], strict=True))
        curves = [fit_curve(*pair) for pair in zip(scores, target, strict=True)]
        return torch.stack([x for x, _ in curves]), torch.stack([y for _, y in curves])

    def scores(self, index: int, layer: LayerScore) -> list[Tensor]:
        """Of a layer that is fitted, `[kv_heads, tokens]` for each window."""
        return [bend(scores.float()[None], layer.x, layer.y)[0] for scores, _ in self.samples[index]]


class _Checks:
    """Correlations, window by window."""

    def __init__(self, lines: dict[int, Line], means: dict[int, Means]) -> None:
        self.lines, self.means = lines, means
        self.correlations: dict[int, list[Tensor]] = {index: [] for index in lines}

    def add(self, seen: Seen) -> None:
        samples = features(seen.keys.double(), seen.values.double(), seen.positions, self.means[seen.layer_idx])
        samples, target = usable(seen, samples), usable(seen, seen.future)
        if samples.shape[1] < 2:
            return
        scores = self.lines[seen.layer_idx](samples)
        alone = [spearman(samples[..., number], target) for number in range(len(SCALARS))]
        self.correlations[seen.layer_idx].append(
            torch.stack([spearman(scores, target), pearson(scores, target), *alone]).cpu()
        )

    def reports(self) -> dict[int, LayerReport]:
        means = {index: torch.stack(tensors).mean(0) for index, tensors in self.correlations.items() if tensors}
        return {
            index: LayerReport(both[0], both[1], dict(zip(SCALARS, both[2:].abs(), strict=True)))
            for index, both in means.items()
        }


# ---- result -----------------------------------------------------------------------------------------------------


def _layer(means: Means, line: Line, x: Tensor, y: Tensor) -> LayerScore:
    parts = {"mean_key": means.key, "mean_value": means.value, "weights": line.weights, "offset": line.offset}
    return LayerScore.of({name: part.float().cpu() for name, part in parts.items()} | {"x": x.float(), "y": y.float()})


def _facts(windows: Sequence[Window], reports: dict[int, LayerReport]) -> dict[str, str]:
    rows = {index: [round(value, 4) for value in report.spearman.tolist()] for index, report in reports.items()}
    return {**text_facts(windows), "distance": str(DISTANCE), "held_out_spearman": json.dumps(rows)}


def text_facts(windows: Sequence[Window]) -> dict[str, str]:
    """What a fitted file tells of the text that was read, and the version of this package."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.tokens.cpu().numpy().tobytes())
    return {
        "hf_paged_eviction": __version__,
        "tokens": str(read_tokens(windows)),
        "windows": str(len(windows)),
        "digest": f"sha256:{digest.hexdigest()}",
    }
