"""Gates as plain loops over numbers, and a policy that finds out by itself what a gate must have said.

In a model of one layer the input of attention is the normed embedding, so it follows from the token alone, and so does
the token's value. The value in a slot tells which token is there, and that tells the score that it must have, whatever
happened to the slot before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import models
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.learned.calibration import fingerprint
from hf_paged_eviction_lab.gate import GateLayer, Gates


def random_gates(model: Any, seed: int = 0, units: int = 16, heads: dict[int, int] | None = None) -> Gates:
    """Gates of random weights for a tiny model; `heads`: KV heads by layer, if layers differ."""
    config, generator = model.config.get_text_config(decoder=True), torch.Generator().manual_seed(seed)
    hidden = config.hidden_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if heads is None:
        heads = dict.fromkeys(range(config.num_hidden_layers), config.num_key_value_heads)
    layers = {
        index: GateLayer(draw(units, hidden) / 4, draw(units), draw(count, units) / 4, draw(count))
        for index, count in heads.items()
    }
    return Gates(layers, fingerprint(model.config))


def slow_scores(layer: GateLayer, hidden: list[float]) -> list[float]:
    """The score of each KV head."""

    def line(weights: Tensor, offset: Tensor, states: list[float]) -> list[float]:
        rows = zip(weights.tolist(), offset.tolist(), strict=True)
        return [sum(w * x for w, x in zip(row, states, strict=True)) + b for row, b in rows]

    inner = line(layer.inner_weights, layer.inner_offset, hidden)
    units = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in inner]
    return [math.exp(x) for x in line(layer.weights, layer.offset, units)]


@dataclass(frozen=True, eq=False)
class SlowGate(EvictionPolicy):
    """Scores the tokens of the only layer of a llama by what its gate says of them, told from their values.

    Attributes:
        values: `[tokens of the vocabulary, kv_heads, dim]`.
        scores: `[tokens of the vocabulary, kv_heads]`.
    """

    values: Tensor
    scores: Tensor

    name = "slow_gate"
    needs = Needs()

    @classmethod
    def of(cls, model: Any, gates: Gates) -> SlowGate:
        """For a llama of one layer."""
        block, heads = model.model.layers[0], model.config.num_key_value_heads
        with torch.no_grad():
            hidden = block.input_layernorm(model.model.embed_tokens.weight)
            values = block.self_attn.v_proj(hidden).view(len(hidden), heads, -1)
        return cls(values, torch.tensor([slow_scores(gates.layers[0], row) for row in hidden.tolist()]))

    def score(self, context: ScoreContext) -> Tensor:
        return self.look_up(context.values)

    def look_up(self, values: Tensor) -> Tensor:
        """The scores `[batch, kv_heads, tokens]` of the tokens with these values."""
        scores = []
        for head in range(values.shape[1]):
            distance = torch.cdist(values[:, head].float(), self.values[:, head])
            scores.append(self.scores[distance.argmin(-1), head])
        return torch.stack(scores, 1)


def one_layer() -> Any:
    """A model of one layer."""
    return models.build("llama", "paged_eviction", num_hidden_layers=1)
