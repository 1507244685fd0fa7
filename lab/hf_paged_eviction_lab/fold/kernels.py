"""Small feature maps whose product stands for the exponential of a logit, per layer and head.

Shapes: `H` KV heads, `Q` query heads, `D` head size, `M` width of a map's middle, `R` rank: features of a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from hf_paged_eviction.internals import fingerprint, refuse_other_model

#: Numbers of the middle of a map that exist at one time, in bytes: many tokens are taken in pieces of this size.
_PIECE = 64 * 2**20
#: Exponents of features are at most this: a product of two, times a billion tokens, is still a float32.
LARGEST = 30.0


@dataclass(frozen=True)
class LayerKernels:
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

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LayerKernels":
        """The reverse of `tensors`.

        Raises:
            ValueError: they do not fit together. KeyError: one is missing.
        """
        kernels = cls(**{field.name: tensors[field.name] for field in fields(cls)})
        if kernels.key_in.dim() != 3 or kernels.key_out.dim() != 3:
            raise ValueError("key_in and key_out must have three dimensions")
        dim, middle, rank = kernels.key_dim, kernels.key_in.shape[2], kernels.rank
        for name, tensor in kernels.tensors().items():
            heads = kernels.kv_heads if name.startswith("key") else kernels.query_heads
            shape = {
                "in": (heads, dim, middle),
                "out": (heads, middle, rank),
                "line": (heads, dim, rank),
                "bias": (heads, rank),
            }[name.partition("_")[2]]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected {shape}")
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name} holds something else than finite numbers")
        if not kernels.kv_heads or kernels.query_heads % kernels.kv_heads or not rank:
            raise ValueError(
                f"{kernels.query_heads} query heads cannot share {kernels.kv_heads} KV heads of rank {rank}"
            )
        return kernels

    def of_keys(self, keys: Tensor) -> Tensor:
        """Features `[B, H, n, R]` float32 of keys `[B, H, n, D]`."""
        maps = self.key_in, self.key_out, self.key_line, self.key_bias
        return torch.cat([_features(piece, *maps) for piece in self._pieces(keys)], dim=2)

    def of_queries(self, queries: Tensor) -> Tensor:
        """Features `[B, Q, q, R]` float32 of queries `[B, Q, q, D]`."""
        maps = self.query_in, self.query_out, self.query_line, self.query_bias
        return torch.cat([_features(piece, *maps) for piece in self._pieces(queries)], dim=2)

    def _pieces(self, states: Tensor) -> tuple[Tensor, ...]:
        rows, heads = states.shape[:2]
        pieces: tuple[Tensor, ...] = states.split(max(1, _PIECE // (4 * rows * heads * self.key_in.shape[-1])), dim=2)
        return pieces

    def to(
        self, device: torch.device, kv_heads: slice = slice(None), query_heads: slice = slice(None)
    ) -> "LayerKernels":
        """Some of the heads in float32, on a device."""
        with torch.inference_mode(False):
            return LayerKernels(
                **{
                    name: tensor[query_heads if name.startswith("query") else kv_heads].to(device, torch.float32)
                    for name, tensor in self.tensors().items()
                }
            )


def _features(states: Tensor, into: Tensor, out: Tensor, line: Tensor, bias: Tensor) -> Tensor:
    """exp(gelu(x in) out + x line + bias)."""
    states = states.float()
    return (gelu(states @ into) @ out + states @ line + bias[:, None]).clamp(-LARGEST, LARGEST).exp()


@dataclass(frozen=True)
class Kernels:
    """The maps of all layers of a model that evict.

    Attributes:
        layers: by index in the model.
        model: see `calibration.model_fingerprint`.
        policy: label of the policy whose losers the maps were fitted to.
        facts: what they were fitted to, and how well.
        digest: SHA-256 of the file that they were read from.
    """

    layers: Mapping[int, LayerKernels]
    model: Mapping[str, str]
    policy: str
    facts: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    def check(self, config: Any, policy: str) -> None:
        """Refuse another model, or another policy.

        Raises:
            ValueError: with what differs.
        """
        remedy = f"Fit some to this model with `paged-eviction fit-fold --policy {policy!r}`."
        refuse_other_model(self.model, fingerprint(config), "These kernels were fitted to", remedy)
        if policy != self.policy:
            raise ValueError(
                f"These kernels were fitted to tokens that the policy {self.policy!r} lets go, and {policy!r} lets "
                f"others go. Use policy={self.policy!r}, or fit kernels with "
                f"`paged-eviction fit-fold --policy {policy!r}`."
            )

    def __deepcopy__(self, memo: Any) -> "Kernels":
        return self  # nobody writes to it

    def layer(self, index: int) -> LayerKernels:
        """The maps of a layer.

        Raises:
            ValueError: there are none.
        """
        kernels = self.layers.get(index)
        if kernels is None:
            indices = ", ".join(map(str, sorted(self.layers)))
            raise ValueError(f"These kernels have no layer {index}: they were fitted to the layers {indices}.")
        return kernels
