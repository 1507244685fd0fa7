"""What was trained for a model: a gate per layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import gelu, linear

from hf_paged_eviction.internals import FileKind, FittedFiles, NamedFiles, Tensors, content_digest

from ..fitted import Fitted, Layer

#: Logarithms of attention are kept within these, so that their exponentials are numbers.
_LOWEST, _HIGHEST = -30.0, 10.0


@dataclass(frozen=True)
class GateLayer(Layer):
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
    def hidden(self) -> int:
        """Width of the hidden states."""
        return (self.weights if self.inner_weights is None else self.inner_weights).shape[-1]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "GateLayer":
        """The reverse of `tensors`.

        Raises:
            ValueError: they do not fit together. TypeError: one is missing, or one too many.
        """
        layer = cls(**tensors)
        if (layer.inner_weights is None) != (layer.inner_offset is None):
            raise ValueError("one half of the inner layer is missing")
        heads, units = layer.offset.numel(), layer.hidden
        if layer.inner_offset is not None:
            units = layer.inner_offset.numel()
        shapes = {"weights": (heads, units), "offset": (heads,)}
        layer.check_shapes({**shapes, "inner_weights": (units, layer.hidden), "inner_offset": (units,)})
        return layer

    def logarithm(self, hidden: Tensor) -> Tensor:
        """The logarithm of the mark, `[..., tokens, kv_heads]` float32, of hidden states `[..., tokens, hidden]`."""
        states = hidden.float()
        if self.inner_weights is not None:
            states = gelu(linear(states, self.inner_weights, self.inner_offset))
        return linear(states, self.weights, self.offset)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Marks `[batch, kv_heads, tokens]` float32 of hidden states `[batch, tokens, hidden]`."""
        return self.logarithm(hidden.detach()).clamp(_LOWEST, _HIGHEST).exp().mT


@dataclass(frozen=True)
class Gates(Fitted[GateLayer]):
    """The gates of all layers of a model that evict.

    `digest` is that of the weights, so two files with the same weights are the same gates.
    """

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


_FILES = FittedFiles(FileKind("gates"), NamedFiles("No gates", Gates.command, "gates.safetensors"), _made)
load_gates = _FILES.load
#: Let `gate:name` mean a file that comes with a package.
name_gates = _FILES.names.name
for _file in sorted((Path(__file__).parent / "published").glob("*.safetensors")):
    name_gates(_file.stem, _file)
#: Whether a name stands for a file on this machine.
is_here = _FILES.names.is_here


def save_gates(gates: Gates, path: str | Path) -> None:
    """Write gates; `load_gates` reads them back bit by bit."""
    _FILES.save(path, {index: layer.tensors() for index, layer in gates.layers.items()}, gates.model, gates.facts)
