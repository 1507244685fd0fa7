"""Fit the kernels of `disposal="fold:FILE"`: forwards of the model, and gradient steps of the small maps alone."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction import __version__
from hf_paged_eviction.internals import HELD_OUT, is_latent_attention, join, model_fingerprint, paged_layers, watched

from .kernels import LARGEST, Kernels, LayerKernels
from .lessons import Eviction, Lesson, lessons
from .state import read_tokens

#: Called after each window that was read and each epoch, with what was done.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is fitted, and how long.

    Attributes:
        eviction: whose losers are folded.
        rank: features of a key, and of a query: the state holds as many values and masses per KV head.
        middle: width of the maps between their two matrices.
        epochs: how often the windows are gone through for each layer.
        rate: of learning, at first; it falls to nothing.
        at_once: layers that are fitted after one reading of the text: more are faster and take more memory.
        seed: of the first maps and the order of the windows.
    """

    eviction: Eviction
    rank: int = 8
    middle: int = 64
    epochs: int = 20
    rate: float = 5e-3
    at_once: int = 4
    seed: int = 0


@dataclass(frozen=True)
class FittedLayer:
    """The maps of a layer, and the squared error of its attention in windows that they were not fitted to.

    Attributes:
        dropped, folded: error without and with the state, as a share of the squared output of the full cache.
    """

    index: int
    kernels: LayerKernels
    dropped: float
    folded: float


def paged_indices(model: Any) -> list[int]:
    """The layers that evict.

    Raises:
        ValueError: of this model nothing can be folded.
    """
    if is_latent_attention(model.config):
        raise ValueError("this model caches latents instead of keys and values (MLA): use another disposal")
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError("layers of this model share keys and values: use another disposal")
    indices = paged_layers(model.config)
    if not indices:
        raise ValueError("no layer of this model can evict")
    return indices


def units(plan: Plan, layers: int, windows: int) -> int:
    """How often `fit_layers` calls its progress."""
    return -(-layers // plan.at_once) * windows + layers * plan.epochs


def fit_layers(
    model: Any, windows: Sequence[Tensor], plan: Plan, layers: Collection[int], progress: Progress = lambda done: None
) -> Iterator[FittedLayer]:
    """Fit the maps of these layers, one after the other. What comes of a layer does not depend on the others.

    The model reads each window with its full cache; nothing of it is changed. What the policy would have let go is
    played on its keys, values and queries.

    Args:
        model: a decoder, in evaluation mode.
        windows: `[1, length]` int64 each, longer than the budgets; every fourth one is kept for checking.

    Raises:
        ValueError: nothing leaves, because the windows are too short for the budgets; or there are too few.
    """
    if len(windows) < 2:
        raise ValueError(f"kernels need at least 2 windows of text, one to check with; got {len(windows)}")
    waiting = sorted(layers)
    for start in range(0, len(waiting), plan.at_once):
        group = waiting[start : start + plan.at_once]
        by_layer: dict[int, list[tuple[int, Lesson]]] = {index: [] for index in group}
        with watched(model):
            for number, window in enumerate(windows):
                take = lambda index, lesson: by_layer[index].append((number, lesson))  # noqa: B023, E731
                lessons(model, window, plan.eviction, number, group, take)
                progress("reading")
        for index in group:
            taught = by_layer.pop(index)
            train = [lesson for number, lesson in taught if number % HELD_OUT != 1]
            check = [lesson for number, lesson in taught if number % HELD_OUT == 1]
            if not train or not check:
                budgets = ", ".join(map(str, plan.eviction.budgets))
                raise ValueError(
                    f"too few windows are long enough for tokens to leave a budget of {budgets}: take smaller budgets, "
                    "or longer windows"
                )
            yield fit_layer(index, train, check, plan, progress)


def fit_layer(
    index: int, train: Sequence[Lesson], check: Sequence[Lesson], plan: Plan, progress: Progress = lambda done: None
) -> FittedLayer:
    """Gradient steps on the maps of one layer, a window each; the epoch that is best on `check` counts."""
    generator = torch.Generator().manual_seed(plan.seed + index)
    with torch.inference_mode(False), torch.enable_grad():
        maps = first_maps(train[0], plan, generator)
        size = torch.stack([lesson.target.square().mean() for lesson in train]).mean()
        best, dropped = silent(maps), _error(None, check)
        folded = dropped
        weights = [tensor.requires_grad_() for tensor in maps.tensors().values()]
        steps = torch.optim.Adam(weights, plan.rate)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(steps, plan.epochs * len(train))
        for _ in range(plan.epochs):
            for at in torch.randperm(len(train), generator=generator).tolist():
                lesson = train[at]
                loss = (answer(maps, lesson) - lesson.target).square().mean() / size
                steps.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 1.0)
                steps.step()
                falling.step()
            error = _error(maps, check)
            if error < folded:
                best, folded = _copy(maps), error
            progress(f"layer {index}")
    return FittedLayer(index, best, dropped, folded)


def answer(maps: LayerKernels, lesson: Lesson) -> Tensor:
    """`[1, Q, q, D]` what attention beside the state says."""
    features = maps.of_queries(lesson.queries), maps.of_keys(lesson.keys)
    return join([lesson.held, read_tokens(*features, lesson.values, lesson.folded)], lesson.logits)


def _error(maps: LayerKernels | None, check: Sequence[Lesson]) -> float:
    """Squared error as a share of the squared target; None = without a state."""
    with torch.no_grad():
        outputs = [join([lesson.held], lesson.logits) if maps is None else answer(maps, lesson) for lesson in check]
        wrong = sum((one - lesson.target).square().sum().item() for one, lesson in zip(outputs, check, strict=True))
        return wrong / sum(lesson.target.square().sum().item() for lesson in check)


def first_maps(lesson: Lesson, plan: Plan, generator: torch.Generator) -> LayerKernels:
    """Maps to begin with: of every key and query nearly the same."""
    queries, keys = lesson.queries, lesson.keys

    def draw(heads: int, into: int, out: int, scale: float) -> Tensor:
        drawn: Tensor = torch.randn(heads, into, out, generator=generator) * scale * into**-0.5
        return drawn.to(keys.device)

    parts = []
    for states in (keys, queries):
        heads, dim = states.shape[1], states.shape[3]
        line = torch.zeros(heads, dim, plan.rank, device=keys.device)
        bias = torch.full((heads, plan.rank), -1.0, device=keys.device)
        parts += [draw(heads, dim, plan.middle, 0.3), draw(heads, plan.middle, plan.rank, 1.0), line, bias]
    return LayerKernels(*parts)


def silent(maps: LayerKernels) -> LayerKernels:
    """Maps of this shape whose state weighs nothing: plain dropping."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in maps.tensors().items()}
    return LayerKernels(**zeros | {name: zeros[name] - LARGEST for name in ("key_bias", "query_bias")})


def _copy(maps: LayerKernels) -> LayerKernels:
    return LayerKernels(**{name: tensor.detach().clone() for name, tensor in maps.tensors().items()})


def make_kernels(model: Any, policy: str, fitted: Sequence[FittedLayer], facts: Mapping[str, str]) -> Kernels:
    """What goes into a file, rounded to 16 bits.

    Args:
        policy: its label.
    """
    layers = {
        layer.index: LayerKernels(**{name: tensor.half() for name, tensor in layer.kernels.tensors().items()})
        for layer in fitted
    }
    errors = {str(layer.index): [layer.dropped, layer.folded] for layer in fitted}
    return Kernels(layers, model_fingerprint(model), policy, {**facts, "held_out_error": json.dumps(errors)})


def plan_facts(plan: Plan, windows: Sequence[Tensor]) -> dict[str, str]:
    """What kernels were fitted to."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.cpu().numpy().tobytes())
    eviction = plan.eviction
    return {
        "hf_paged_eviction": __version__,
        "policy": eviction.policy,
        "heads": eviction.heads,
        "budgets": ", ".join(map(str, eviction.budgets)),
        "block_size": str(eviction.block_size),
        "rank": str(plan.rank),
        "middle": str(plan.middle),
        "epochs": str(plan.epochs),
        "rate": str(plan.rate),
        "seed": str(plan.seed),
        "windows": str(len(windows)),
        "tokens": str(sum(window.numel() for window in windows)),
        "digest": f"sha256:{digest.hexdigest()}",
    }
