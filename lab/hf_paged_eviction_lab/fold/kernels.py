"""Small feature maps whose product stands for the exponential of a logit, per layer and head.

Shapes: `H` KV heads, `Q` query heads, `D` head size, `M` width of a map's middle, `R` rank: features of a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import gelu

from hf_paged_eviction.internals import FileKind, FittedFiles, Tensors

from ..fitted import Fitted, Layer

#: Exponents of features are at most this: a product of two, times a billion tokens, is still a float32.
LARGEST = 30.0


@dataclass(frozen=True)
class LayerKernels(Layer):
    """The maps of one layer, for keys and for queries.

    Attributes:
        key_in, query_in: `[H or Q, D, M]`.
        key_out, query_out: `[H or Q, M, R]`.
        key_line, query_line: `[H or Q, D, R]`.
        key_bias, query_bias: `[H or Q, R]`.
    """

    key_in: Tensor
    key_out: Tensor
    key_line: Tensor
    key_bias: Tensor
    query_in: Tensor
    query_out: Tensor
    query_line: Tensor
    query_bias: Tensor

    @property
    def kv_heads(self) -> int:
        return self.key_in.shape[0]

    @property
    def query_heads(self) -> int:
        return self.query_in.shape[0]

    @property
    def key_dim(self) -> int:
        return self.key_in.shape[1]

    @property
    def rank(self) -> int:
        return self.key_out.shape[2]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LayerKernels":
        """The reverse of `tensors`.

        Raises:
            ValueError: they do not fit together. KeyError: one is missing.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        kernels = cls(**{field.name: tensors[field.name] for field in fields(cls)})
        if kernels.key_in.dim() != 3 or kernels.key_out.dim() != 3:
            raise ValueError("key_in and key_out must have three dimensions")
        dim, middle, rank = kernels.key_dim, kernels.key_in.shape[2], kernels.rank
        for kind, heads in (("key", kernels.kv_heads), ("query", kernels.query_heads)):
            shapes |= {
                f"{kind}_in": (heads, dim, middle),
                f"{kind}_out": (heads, middle, rank),
                f"{kind}_line": (heads, dim, rank),
                f"{kind}_bias": (heads, rank),
            }
        kernels.check_shapes(shapes)
        if not kernels.kv_heads or kernels.query_heads % kernels.kv_heads or not rank:
            raise ValueError(
                f"{kernels.query_heads} query heads cannot share {kernels.kv_heads} KV heads of rank {rank}"
            )
        return kernels

    def of_keys(self, keys: Tensor) -> Tensor:
        """Features `[B, H, n, R]` float32 of keys `[B, H, n, D]`."""
        return _features(keys, self.key_in, self.key_out, self.key_line, self.key_bias)

    def of_queries(self, queries: Tensor) -> Tensor:
        """Features `[B, Q, q, R]` float32 of queries `[B, Q, q, D]`."""
        return _features(queries, self.query_in, self.query_out, self.query_line, self.query_bias)

    def of_heads(self, first: int, count: int) -> "LayerKernels":
        """The maps of some KV heads, and of the query heads that share them."""
        group = self.query_heads // self.kv_heads
        heads = {"key": slice(first, first + count), "query": slice(first * group, (first + count) * group)}
        return LayerKernels(**{name: tensor[heads[name.split("_")[0]]] for name, tensor in self.tensors().items()})


def _features(states: Tensor, into: Tensor, out: Tensor, line: Tensor, bias: Tensor) -> Tensor:
    """exp(gelu(x in) out + x line + bias)."""
    states = states.float()
    return (gelu(states @ into) @ out + states @ line + bias[:, None]).clamp(-LARGEST, LARGEST).exp()


@dataclass(frozen=True)
class Kernels(Fitted[LayerKernels]):
    """The maps of all layers of a model that evict.

    Attributes:
        policy: label of the policy whose losers the maps were fitted to.
    """

    policy: str = ""
    subject: ClassVar[str] = "These kernels were fitted to"
    command: ClassVar[str] = "paged-eviction fit-fold"

    def check_policy(self, policy: str) -> None:
        """Refuse another policy.

        Raises:
            ValueError: with what to use instead.
        """
        if policy != self.policy:
            raise ValueError(
                f"These kernels were fitted to tokens that the policy {self.policy!r} lets go, and {policy!r} lets "
                f"others go. Use policy={self.policy!r}, or fit kernels with `{self.command} --policy {policy!r}`."
            )


# ---- files ----------------------------------------------------------------------------------------------------------


def _made(layers: Tensors, header: dict[str, Any]) -> Kernels:
    kernels = {index: LayerKernels.of(parts) for index, parts in layers.items()}
    return Kernels(kernels, header["model"], header["facts"], header["digest"], header["policy"])


_FILES = FittedFiles(FileKind("fold"), Kernels.command, _made, "kernels")
#: Those of the small model of the package `hf_paged_eviction_eval`.
EMBEDDED = Path(__file__).parent / "published" / "embedded.safetensors"


def load_kernels(file: str | Path) -> Kernels:
    """Read kernels; "embedded" are those of the small model.

    Raises:
        ValueError: there is no such file, or it cannot be used.
    """
    return _FILES.load(EMBEDDED if str(file) == "embedded" else file)


def save_kernels(kernels: Kernels, path: str | Path) -> None:
    """Write kernels; `load_kernels` reads them back bit by bit."""
    layers = {index: layer.tensors() for index, layer in kernels.layers.items()}
    _FILES.save(path, layers, kernels.model, kernels.facts, policy=kernels.policy)
