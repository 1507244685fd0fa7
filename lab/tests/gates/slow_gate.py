"""Gates as plain loops over numbers, and a policy that finds out by itself what a gate must have said.

In a model of one layer the input of attention is the normed embedding, so it follows from the token alone, and so does
the token's value. A slot's value then tells which token lies there, and that tells the mark that it must have, whatever
became of the slot on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import models
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.learned.calibration.calibration import fingerprint
from hf_paged_eviction.policies.needs import Cutoff
from hf_paged_eviction_lab.gates import GateLayer, Gates


def random_gates(model: Any, units: int | None = 16, seed: int = 0) -> Gates:
    """Gates of random weights for a tiny model; lines for None."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, hidden = config.num_key_value_heads, config.hidden_size
    layers = {
        index: GateLayer(draw(heads, hidden) / 4, draw(heads))
        if units is None
        else GateLayer(draw(heads, units) / 4, draw(heads), draw(units, hidden) / 4, draw(units))
        for index in range(config.num_hidden_layers)
    }
    return Gates(layers, fingerprint(config))


def slow_marks(layer: GateLayer, hidden: list[float]) -> list[float]:
    """The mark of each KV head."""

    def line(weights: Tensor, offset: Tensor, states: list[float]) -> list[float]:
        rows = zip(weights.tolist(), offset.tolist(), strict=True)
        return [sum(w * x for w, x in zip(row, states, strict=True)) + b for row, b in rows]

    if layer.inner_weights is not None and layer.inner_offset is not None:
        inner = line(layer.inner_weights, layer.inner_offset, hidden)
        hidden = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in inner]
    return [math.exp(x) for x in line(layer.weights, layer.offset, hidden)]


@dataclass(frozen=True, eq=False)
class SlowGate(EvictionPolicy):
    """Scores the tokens of the only layer of a llama by what its gate says of them, told from their values.

    Attributes:
        values: `[tokens of the vocabulary, kv_heads, dim]`.
        marks: `[tokens of the vocabulary, kv_heads]`.
    """

    values: Tensor
    marks: Tensor
    above: Cutoff | None = None

    name = "slow_gate"

    @property
    def needs(self) -> Needs:
        return Needs(cutoff=self.above)

    @classmethod
    def of(cls, model: Any, gates: Gates, cutoff: Cutoff | None = None) -> SlowGate:
        """For a llama of one layer."""
        block, heads = model.model.layers[0], model.config.num_key_value_heads
        with torch.no_grad():
            hidden = block.input_layernorm(model.model.embed_tokens.weight)
            values = block.self_attn.v_proj(hidden).view(len(hidden), heads, -1)
        return cls(values, torch.tensor([slow_marks(gates.layers[0], row) for row in hidden.tolist()]), cutoff)

    def score(self, context: ScoreContext) -> Tensor:
        scores = []
        for head in range(context.values.shape[1]):
            distance = torch.cdist(context.values[:, head].float(), self.values[:, head])
            scores.append(self.marks[distance.argmin(-1), head])
        return torch.stack(scores, 1)


def one_layer(attention: str = "sdpa") -> Any:
    """A model of one layer."""
    return models.build("llama", attention, num_hidden_layers=1)
