"""The trained gates of a model, one per layer, and their file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import gelu, linear

from hf_paged_eviction.internals import FileKind, FittedFiles, Tensors, content_digest

from ..fitted import Fitted, Layer

#: Logarithms of scores are kept within these, so that their exponentials are finite.
_LOWEST, _HIGHEST = -30.0, 10.0


@dataclass(frozen=True)
class GateLayer(Layer):
    """The gate of one layer: two linear maps with a GELU between them.

    Attributes:
        inner_weights: `[units, hidden]`.
        inner_offset: `[units]`.
        weights: `[kv_heads, units]`, of all KV heads of the layer.
        offset: `[kv_heads]`.
    """

    inner_weights: Tensor
    inner_offset: Tensor
    weights: Tensor
    offset: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "GateLayer":
        """The reverse of `tensors`.

        Raises:
            ValueError: they do not fit together. TypeError: one is missing, or one too many.
        """
        layer = cls(**tensors)
        heads, units, hidden = layer.offset.numel(), layer.inner_offset.numel(), layer.inner_weights.shape[-1]
        if not (heads and units and hidden):
            raise ValueError(f"{heads} KV heads, {units} units, {hidden} channels: none may be 0")
        inner = {"inner_weights": (units, hidden), "inner_offset": (units,)}
        layer.check_shapes({**inner, "weights": (heads, units), "offset": (heads,)})
        return layer

    def log_scores(self, hidden: Tensor) -> Tensor:
        """Logarithms of scores, `[..., tokens, kv_heads]` float32, of hidden states `[..., tokens, hidden]`."""
        units = gelu(linear(hidden.float(), self.inner_weights, self.inner_offset))
        return linear(units, self.weights, self.offset).clamp(_LOWEST, _HIGHEST)


@dataclass(frozen=True)
class Gates(Fitted[GateLayer]):
    """The gates of all layers of a model that evict. `digest` is that of their weights."""

    subject: ClassVar[str] = "These gates were trained for"
    command: ClassVar[str] = "paged-eviction fit-gate"

    def __post_init__(self) -> None:
        tensors = {
            f"{index}.{name}": tensor.detach().cpu().contiguous()
            for index, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }
        object.__setattr__(self, "digest", content_digest("", tensors)[:16])


# ---- files ----------------------------------------------------------------------------------------------------------


def _made(layers: Tensors, header: dict[str, Any]) -> Gates:
    return Gates({index: GateLayer.of(parts) for index, parts in layers.items()}, header["model"], header["facts"])


_FILES = FittedFiles(FileKind("gates"), Gates.command, _made)
load_gates = _FILES.load


def save_gates(gates: Gates, path: str | Path) -> None:
    """Write gates; `load_gates` reads them back bit by bit."""
    _FILES.save(path, {index: layer.tensors() for index, layer in gates.layers.items()}, gates.model, gates.facts)
