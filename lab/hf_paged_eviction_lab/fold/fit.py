"""Fit the kernels of `disposal="fold(file=...)"`: forwards of the model, and gradient steps of the small maps alone."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import (
    HELD_OUT,
    PAGED_EVICTION,
    is_latent_attention,
    join,
    map_tensors,
    model_fingerprint,
    paged_layers,
    text_facts,
    using,
)

from ..fitted import Progress, no_progress
from .kernels import LARGEST, Kernels, LayerKernels
from .lessons import Lesson, lessons
from .state import read_tokens

#: Of learning, at first; it falls to nothing.
_RATE = 5e-3
#: Layers that are fitted after one reading of the text: more would be faster and take more memory.
_AT_ONCE = 4


@dataclass(frozen=True)
class Plan:
    """What is fitted, and how long.

    Attributes:
        policy, heads, block_size, profile: of the cache whose losers are folded.
        budgets: of that cache, in tokens; the windows take turns.
        rank: features of a key, and of a query: the state holds as many values and masses per KV head.
        middle: width of the maps between their two matrices.
        epochs: how often the windows are gone through for each layer.
    """

    policy: str
    budgets: tuple[int, ...]
    heads: str = "shared"
    block_size: int = 16
    rank: int = 8
    middle: int = 64
    epochs: int = 20
    profile: str | None = None

    def cache(self, config: Any, turn: int) -> PagedEvictionCache:
        """A cache that evicts so."""
        budget = self.budgets[turn % len(self.budgets)]
        heads: Any = self.heads
        return PagedEvictionCache(config, budget, self.block_size, self.policy, heads, profile=self.profile)


def fit_kernels(model: Any, windows: Sequence[Tensor], plan: Plan, progress: Progress = no_progress) -> Kernels:
    """Fit the maps of the layers that evict, one after the other. What comes of one does not depend on the others.

    The model reads each window with its full cache; nothing of it is changed. What the policy would have let go is
    played on its keys, values and queries. The fact "held_out_error" tells by layer the squared error of attention
    without and with the state, as a share of the squared output of the full cache, in windows that were held out.

    Args:
        model: a decoder, in evaluation mode.
        windows: of one row each, longer than the budgets; every fourth one is kept for checking.

    Raises:
        ValueError: of this model nothing can be folded; there are too few windows, or they are too short for the
            budgets, so that nothing leaves.
    """
    if is_latent_attention(model.config):
        raise ValueError("this model caches latents instead of keys and values (MLA): use another disposal")
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError("layers of this model share keys and values: use another disposal")
    if len(windows) < 2:
        raise ValueError(f"kernels need at least 2 windows of text, one to check with; got {len(windows)}")
    layers, errors = {}, {}
    indices = paged_layers(model.config)
    groups = [indices[start : start + _AT_ONCE] for start in range(0, len(indices), _AT_ONCE)]
    done, steps = 0, len(groups) * len(windows) + len(indices)
    for group in groups:
        taught: list[dict[int, Lesson]] = []
        with using(model, PAGED_EVICTION):
            for turn, window in enumerate(windows):
                taught.append(lessons(model, window, plan.cache(model.config, turn), turn, group))
                done += 1
                progress(done, steps)
        for index in group:
            train = [by_layer[index] for at, by_layer in enumerate(taught) if at % HELD_OUT != 1 and index in by_layer]
            check = [by_layer[index] for by_layer in taught[1::HELD_OUT] if index in by_layer]
            if not train or not check:
                raise ValueError(
                    "too few windows are long enough for tokens to leave a budget of "
                    f"{', '.join(map(str, plan.budgets))}: take smaller budgets, or longer windows"
                )
            maps, *errors[index] = fit_layer(index, train, check, plan)
            layers[index] = map_tensors(Tensor.half, maps)
            done += 1
            progress(done, steps)
    settings = {name: str(value) for name, value in asdict(plan).items()}
    facts = {**text_facts(windows), **settings, "budgets": ", ".join(map(str, plan.budgets))}
    facts["held_out_error"] = json.dumps(errors)
    return Kernels(layers, model_fingerprint(model), facts, policy=plan.policy)


def fit_layer(
    index: int, train: Sequence[Lesson], check: Sequence[Lesson], plan: Plan
) -> tuple[LayerKernels, float, float]:
    """Gradient steps on the maps of one layer, a window each; the epoch that is best on `check` counts.

    Returns:
        The maps, and the error on `check` without and with the state.
    """
    generator = torch.Generator().manual_seed(index)
    with torch.inference_mode(False), torch.enable_grad():
        maps = first_maps(train[0], plan, generator)
        size = torch.stack([lesson.target.square().mean() for lesson in train]).mean()
        best, dropped = silent(maps), _error(None, check)
        folded = dropped
        weights = [tensor.requires_grad_() for tensor in maps.tensors().values()]
        steps = torch.optim.Adam(weights, _RATE)
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
                best, folded = map_tensors(lambda tensor: tensor.detach().clone(), maps), error
    return best, dropped, folded


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
    zeros = map_tensors(torch.zeros_like, maps)
    return replace(zeros, key_bias=zeros.key_bias - LARGEST, query_bias=zeros.query_bias - LARGEST)
