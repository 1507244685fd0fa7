"""Attention beside a state of folded tokens, as the formula says it; and kernels for tiny models."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged_eviction.integration.models import is_paged, layer_plan
from hf_paged_eviction.learned.calibration import fingerprint
from hf_paged_eviction_lab.fold import Kernels, LayerKernels, save_kernels
from reference import Recorder

Vector = Sequence[float]


def random_kernels(config: Any, policy: str = "keydiff", rank: int = 3, seed: int = 0) -> Kernels:
    """Kernels whose products are about as large as the exponentials of logits."""
    text = config.get_text_config(decoder=True)
    heads, queries = text.num_key_value_heads, text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // queries
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layers = {
        index: LayerKernels(
            *(draw(heads, dim, 5), draw(heads, 5, rank), draw(heads, dim, rank), draw(heads, rank)),
            *(draw(queries, dim, 5), draw(queries, 5, rank), draw(queries, dim, rank), draw(queries, rank)),
        )
        for index, layer in enumerate(layer_plan(config))
        if is_paged(layer)
    }
    return Kernels(layers, fingerprint(config), policy=policy)


def saved_kernels(folder: Path, config: Any, policy: str = "keydiff", **settings: Any) -> str:
    """The text of a disposal with random kernels."""
    path = folder / f"{abs(hash((policy, *settings.items())))}.safetensors"
    save_kernels(random_kernels(config, policy, **settings), path)
    return f"fold(file={str(path)!r})"


# ---- plain Python ----------------------------------------------------------------------------------------------------


def slow_features(state: Vector, kernels: LayerKernels, kind: str, head: int) -> list[float]:
    """exp(gelu(x A) B + x C + b)."""
    into, out, line, bias = (
        getattr(kernels, f"{kind}_{part}")[head].tolist() for part in ("in", "out", "line", "bias")
    )
    middle = [sum(x * row[m] for x, row in zip(state, into, strict=True)) for m in range(len(into[0]))]
    middle = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in middle]
    features = []
    for r in range(len(bias)):
        exponent = sum(x * row[r] for x, row in zip(middle, out, strict=True))
        exponent += sum(x * row[r] for x, row in zip(state, line, strict=True)) + bias[r]
        features.append(math.exp(min(max(exponent, -30.0), 30.0)))
    return features


def slow_attention(
    query: Vector,
    held: list[tuple[Vector, Vector]],
    folded: list[tuple[Vector, Vector]],
    kernels: LayerKernels,
    query_head: int,
    scaling: float,
) -> list[float]:
    """What one query gets of keys and values that are held, and of others that were folded."""
    head = query_head * kernels.kv_heads // kernels.query_heads
    query_features = slow_features(query, kernels, "query", query_head)
    weights = [math.exp(scaling * sum(q * k for q, k in zip(query, key, strict=True))) for key, _ in held]
    for key, _ in folded:
        key_features = slow_features(key, kernels, "key", head)
        weights.append(sum(phi * psi for phi, psi in zip(query_features, key_features, strict=True)))
    values = [value for _, value in [*held, *folded]]
    width = len(values[0])
    return [sum(w * value[at] for w, value in zip(weights, values, strict=True)) / sum(weights) for at in range(width)]


# ---- in a whole model ------------------------------------------------------------------------------------------------


@contextmanager
def folding(model: Any, recorder: Recorder, kernels: Kernels) -> Iterator[None]:
    """Within, eager attention of such a model reads every earlier token that its mask hides through the kernels."""
    originals: dict[Any, Any] = {}
    places = {
        sys.modules[type(module).__module__]
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
    }

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        maps = kernels.layers.get(module.layer_idx)
        if maps is None:
            own = originals[sys.modules[type(module).__module__]]
            options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            options = {name: option for name, option in options.items() if option is not None}
            return own(module, query, key, value, attention_mask, **options, **kwargs)
        group = query.shape[1] // key.shape[1]
        query, key, value = query.double(), key.double(), value.double()
        products = query @ key.repeat_interleave(group, 1).mT * (scaling or query.shape[-1] ** -0.5)
        products = products if softcap is None else (products / softcap).tanh() * softcap
        visible = attention_mask[..., : key.shape[2]] == 0
        weights = products.exp() * visible
        features = maps.of_queries(query.float()).double(), maps.of_keys(key.float()).double()
        past = recorder.mask[:, None, None].bool() & torch.ones(visible.shape[-2:]).tril().bool()
        weights = weights + features[0] @ features[1].repeat_interleave(group, 1).mT * (past & ~visible)
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.double().exp()[None, :, None, None]
        output = weights / total @ value.repeat_interleave(group, 1)
        return output.float().transpose(1, 2).contiguous(), None

    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            originals[place] = place.eager_attention_forward
            patch.setattr(place, "eager_attention_forward", attend)
        yield
