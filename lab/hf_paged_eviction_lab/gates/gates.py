"""What was trained for a model: a gate per layer."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import fingerprint, refuse_other_model

#: Logarithms of attention are kept within these, so that their exponentials are numbers.
_LOWEST, _HIGHEST = -30.0, 10.0


@dataclass(frozen=True)
class GateLayer:
    """The gate of one layer: of each token's hidden state, a mark for each KV head.

    The mark is what the gate was trained on, brought back from its logarithm, so it has a unit: of target "attention"
    the largest share of a query's attention that the token will get from afar. So heads can be averaged.

    Attributes:
        weights: `[kv_heads, units]`, or `[kv_heads, hidden]` where there is no layer between.
        offset: `[kv_heads]`.
        inner_weights: `[units, hidden]`; None = a line. Between the two stands a GELU.
        inner_offset: `[units]`.
    """

    weights: Tensor
    offset: Tensor
    inner_weights: Tensor | None = None
    inner_offset: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.weights.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return (self.weights if self.inner_weights is None else self.inner_weights).shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, by name."""
        named = {name: getattr(self, name) for name in ("weights", "offset", "inner_weights", "inner_offset")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "GateLayer":
        """The reverse of `tensors`.

        Raises:
            ValueError: they do not fit together. KeyError, TypeError: one is missing, or one too many.
        """
        layer = cls(**tensors)
        for name, tensor in layer.tensors().items():
            if tensor.ndim != (2 if name.endswith("weights") else 1):
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which has too many or few dimensions")
        shapes: dict[str, tuple[int, ...]] = {"weights": (layer.kv_heads, layer.hidden), "offset": (layer.kv_heads,)}
        if (layer.inner_weights is None) != (layer.inner_offset is None):
            raise ValueError("one half of the inner layer is missing")
        if layer.inner_weights is not None:
            units = layer.inner_weights.shape[0]
            shapes |= {
                "weights": (layer.kv_heads, units),
                "inner_weights": (units, layer.hidden),
                "inner_offset": (units,),
            }
        for name, tensor in layer.tensors().items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected {shapes[name]}")
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name} holds something else than finite numbers")
        return layer

    def logarithm(self, hidden: Tensor) -> Tensor:
        """The logarithm of the mark, `[..., tokens, kv_heads]` float32, of hidden states `[..., tokens, hidden]`."""
        states = hidden.float()
        if self.inner_weights is not None:
            states = torch.nn.functional.linear(states, self.inner_weights, self.inner_offset)
            states = torch.nn.functional.gelu(states)
        return torch.nn.functional.linear(states, self.weights, self.offset)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Marks `[batch, kv_heads, tokens]` float32 of hidden states `[batch, tokens, hidden]`."""
        return self.logarithm(hidden.detach()).clamp(_LOWEST, _HIGHEST).exp().mT

    def to(self, device: torch.device) -> "GateLayer":
        """The same in float32 on a device."""
        with torch.inference_mode(False):
            moved = {name: tensor.detach().to(device, torch.float32) for name, tensor in self.tensors().items()}
        return GateLayer(**moved)


@dataclass(frozen=True)
class Gates:
    """The gates of all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `calibration.model_fingerprint`.
        facts: what they were trained on, and how well they foretell.
    """

    layers: Mapping[int, GateLayer]
    model: Mapping[str, str]
    facts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights. Two files with the same weights are the same gates."""
        sha256 = hashlib.sha256()
        for index, layer in sorted(self.layers.items()):
            for name, tensor in layer.tensors().items():
                sha256.update(f"{index}.{name}.{tuple(tensor.shape)}".encode())
                sha256.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
        return sha256.hexdigest()[:16]

    def check_model(self, config: Any) -> None:
        """Refuse another model; by its weights, too, where they are registered.

        Raises:
            ValueError: with what differs.
        """
        self.check_fingerprint(fingerprint(config))

    def check_fingerprint(self, actual: Mapping[str, str]) -> None:
        """Refuse a model that says otherwise of itself, see `calibration.model_fingerprint`.

        Raises:
            ValueError: with what differs.
        """
        remedy = "Train some for this model with `paged-eviction fit-gate`."
        refuse_other_model(self.model, actual, "These gates were trained for", remedy)
