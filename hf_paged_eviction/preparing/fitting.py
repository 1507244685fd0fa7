"""Fit a calibration: the model reads windows of text, and a linear system is solved for each layer.

There are three passes over the keys and values of a layer, because each needs the result of the one before: the mean
key and value, the sums of the normal equations, the curve and the correlations.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..integration.implementations import using
from ..integration.model_rotary import known_rotaries
from ..integration.models import is_latent_attention, paged_layers
from ..learned.calibration import Calibration, model_fingerprint
from ..learned.moments import least_squares
from ..learned.score import SCALARS, LayerScore, bend, features, unit
from ..learned.shares import HeadShares
from ..queries.attention import PAGED_EVICTION
from ..version import __version__
from .future import DISTANCE, Seen, usable, watch

#: One of this many windows is held out for the check.
HELD_OUT = 4
#: Number of windows for the mean key and value.
_MEAN_WINDOWS = 8
#: What weights cost, see `least_squares`. The many components of the unit key cost more than the few numbers that are
#: known to help: on text unlike that of the fit they would otherwise mislead.
_SCALAR_PENALTY, _DIRECTION_PENALTY = 1e-3, 1.0
#: Shares of the samples between which a knot lies: dense where eviction decides, among the highest scores.
_EDGES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8125, 0.875, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
#: The least slope anywhere, as a share of the mean slope: different scores stay different.
_LEAST_SLOPE = 1e-2
#: Shares of the tokens for which a table of shares of heads is learned.
KEPT = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
#: Smallest number of tokens of a window that a head counts for.
_LEAST = 4


def fit(
    model: Any, windows: Sequence[Tensor], progress: Callable[[float], object] = lambda tokens: None
) -> Calibration:
    """Fit a score to the attention of a model in some windows of text, and shares of heads to the scores.

    The model is restored afterwards; meanwhile its attention implementation is "paged_eviction". The score reads keys
    before rotary embedding, or keys as cached if the model's rotation is not known. The fact "held_out_spearman" says
    how well scores predict the order of attention in every fourth window: by layer a number for each KV head.

    Args:
        model: a decoder, in evaluation mode.
        windows: `[rows, tokens]` int64 each: any text, some hundred tokens or more; a few thousand tokens in all are
            enough.
        progress: called after each layer of a forward with the number of tokens that it read, divided by the number of
            layers.

    Raises:
        ValueError: the model caches latents (MLA) or has no layer that evicts, or there is too little text.
    """
    if is_latent_attention(model.config):
        raise ValueError("This model caches latents instead of keys and values (MLA); no score is known for those.")
    if len(windows) < 2:
        raise ValueError(f"A calibration needs at least 2 windows of text, one to check with; got {len(windows)}.")
    about = model_fingerprint(model)
    paged = paged_layers(model.config)
    rotaries = known_rotaries(model.config, paged)
    train: dict[int, list[Seen]] = {}
    held_out: dict[int, list[Seen]] = {}
    with using(model, PAGED_EVICTION):
        for number, window in enumerate(windows):
            part = held_out if number % HELD_OUT == 1 else train

            def note(seen: Seen, part: dict[int, list[Seen]] = part, tokens: int = window.numel()) -> None:
                rotary = rotaries.get(seen.layer_idx)
                keys = seen.keys if rotary is None else rotary.unrotate(seen.keys, seen.positions)
                if keys.shape[2] > DISTANCE:
                    part.setdefault(seen.layer_idx, []).append(replace(seen, keys=keys))
                progress(tokens / len(paged))

            watch(model, window, note)
    if not train:
        reason = f"No layer of this model can evict, or no window is longer than {DISTANCE} tokens"
        raise ValueError(f"{reason}: there is nothing to calibrate.")
    layers, scores, spearmans = {}, {}, {}
    for index, layer in train.items():
        layers[index], scores[index], correlation = _fit_layer(layer, held_out.get(index, ()))
        if correlation:
            spearmans[index] = correlation
    facts = {**text_facts(windows), "distance": str(DISTANCE), "held_out_spearman": json.dumps(spearmans)}
    return Calibration(layers, about, facts, bool(rotaries), learn_shares(scores))


def text_facts(windows: Sequence[Tensor]) -> dict[str, str]:
    """What a fitted file tells of the text that was read, and the version of this package."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.cpu().numpy().tobytes())
    return {
        "hf_paged_eviction": __version__,
        "tokens": str(sum(window.numel() for window in windows)),
        "windows": str(len(windows)),
        "digest": f"sha256:{digest.hexdigest()}",
    }


def _fit_layer(train: Sequence[Seen], held_out: Sequence[Seen]) -> tuple[LayerScore, list[Tensor], list[float]]:
    """The score of a layer; what it says of each window, `[kv_heads, tokens]`; its correlation with the order of
    attention in windows that were held out, for each KV head, empty if they are too short."""
    mean_key, mean_value = _means(train[:_MEAN_WINDOWS])

    def samples(seen: Seen, dtype: torch.dtype) -> Tensor:
        return usable(features(seen.keys.to(dtype), seen.values.to(dtype), seen.positions, mean_key, mean_value))

    penalty = [_SCALAR_PENALTY] * len(SCALARS) + [_DIRECTION_PENALTY] * mean_key.shape[1]
    portions = ((samples(seen, torch.float32), usable(seen.future)) for seen in train)
    line = least_squares(portions, torch.tensor(penalty, device="cpu"))
    scores = [line(samples(seen, torch.float64)).cpu() for seen in train]
    targets = [usable(seen.future).cpu() for seen in train]
    curves = zip(*map(fit_curve, torch.cat(scores, dim=1), torch.cat(targets, dim=1)), strict=True)
    parts = dict(zip(("x", "y"), map(torch.stack, curves), strict=True))
    parts |= {"mean_key": mean_key, "mean_value": mean_value, "weights": line.weights, "offset": line.offset}
    layer = LayerScore.of({name: part.float().cpu() for name, part in parts.items()})
    correlations = [
        spearman(line(samples(seen, torch.float64)), usable(seen.future)).cpu()
        for seen in held_out
        if usable(seen.future).shape[1] > 1
    ]
    mean = torch.stack(correlations).mean(0).tolist() if correlations else []
    return layer, [bend(part.float()[None], layer.x, layer.y)[0] for part in scores], [round(one, 4) for one in mean]


def _means(windows: Sequence[Seen]) -> tuple[Tensor, Tensor]:
    """The mean key and the mean value of a layer, see `LayerScore`."""
    none = torch.zeros((), dtype=torch.float64, device=windows[0].keys.device)
    keys = sum((usable(unit(seen.keys.double())).sum(1) for seen in windows), none)
    values = sum((usable(seen.values.double()).sum(1) for seen in windows), none)
    count = sum(usable(seen.future).shape[1] for seen in windows)
    return unit(keys), values / count


def fit_curve(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Knots of the isotonic regression of `target` on `scores`, over groups of similar scores.

    Args:
        scores, target: `[samples]`.

    Returns:
        `x` and `y`, both `[knots]` float64, strictly rising unless all scores are equal.
    """
    scores, order = scores.double().sort()
    target = target.double()[order]
    bounds = [round(edge * len(scores)) for edge in _EDGES]
    groups = [slice(low, high) for low, high in pairwise(bounds) if high > low]
    x = torch.stack([scores[group].mean() for group in groups])
    y = _rising([float(target[group].mean()) for group in groups], [group.stop - group.start for group in groups])
    return _with_slope(x, torch.tensor(y, dtype=torch.float64, device="cpu"), len(_EDGES) - 1)


def _rising(values: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """The closest sequence that never falls: neighbours that fall are joined into their mean."""
    pools: list[tuple[float, int, int]] = []  # mean, samples, values
    for value, size in zip(values, sizes, strict=True):
        pools.append((value, size, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (low, few, a), (high, more, b) = pools[-2:]
            pools[-2:] = [((low * few + high * more) / (few + more), few + more, a + b)]
    return [mean for mean, _, count in pools for _ in range(count)]


def _with_slope(x: Tensor, y: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    span = x[-1] - x[0]
    slope = (y[-1] - y[0]) / span if span > 0 else torch.zeros_like(span)
    y = y + _LEAST_SLOPE * slope.clamp_min(1e-9) * (x - x[0])
    # With fewer samples than groups there are fewer knots; more of the last change nothing.
    missing = knots - len(x)
    return torch.cat([x, x[-1:].expand(missing)]), torch.cat([y, y[-1:].expand(missing)])


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of ranks along the last dimension, 0 if one of the two is constant; equal values share the mean of
    their ranks."""
    a, b = (rank - rank.mean(-1, keepdim=True) for rank in map(_ranks, (a, b)))
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(norms > 0, (a * b).sum(-1) / norms.clamp_min(1e-300), 0.0)


def _ranks(values: Tensor) -> Tensor:
    ordered = values.sort(dim=-1).values
    low = torch.searchsorted(ordered, values.contiguous())
    high = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (low + high).double() / 2


def learn_shares(scores: Mapping[int, Sequence[Tensor]]) -> HeadShares:
    """Learn the shares that one threshold over all layers and heads leaves to each head, on average over texts.

    Args:
        scores: by layer, `[kv_heads, tokens]` for each text; they must be comparable across layers and heads.
    """
    layers = sorted(scores)
    sizes = [scores[index][0].shape[0] for index in layers]
    tables = []
    for kept_share in KEPT:
        total = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        for parts in zip(*(scores[index] for index in layers), strict=True):
            text = torch.cat(list(parts)).float()
            threshold = text.flatten().topk(max(int(text.numel() * kept_share), 1)).values[-1]
            above = (text >= threshold).sum(-1).double().clamp_min(_LEAST)
            total += above / above.mean()
        tables.append((total / total.mean()).split(sizes))
    by_layer = {index: torch.stack([table[at] for table in tables]).float() for at, index in enumerate(layers)}
    return HeadShares(KEPT, by_layer)
