"""Checks that new keys and values have the shape and dtype of the held ones."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateKind:
    """The properties that the keys and values of a layer share in all forwards.

    Attributes:
        heads: number of KV heads.
        key_width, value_width: head sizes of keys and values.
        dtype: dtype of both; if they differ, the wider one.
        device: device of both.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layer_idx: int, keys: Tensor, values: Tensor) -> "StateKind":
        """The kind of keys and values `[rows, kv_heads, tokens, width]`.

        Raises:
            TypeError: they are not floating point. ValueError: they do not fit together.
        """
        shapes = f"keys {list(keys.shape)} and values {list(values.shape)}"
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"Layer {layer_idx} got {shapes}: both must be [rows, kv_heads, tokens, head_dim], alike but for "
                "head_dim."
            )
        if not (keys.dtype.is_floating_point and values.dtype.is_floating_point):
            raise TypeError(
                f"Layer {layer_idx} got keys in {keys.dtype} and values in {values.dtype}: both must be floating-point "
                "numbers, such as the model's own."
            )
        if keys.device != values.device:
            raise ValueError(
                f"Layer {layer_idx} got keys on {keys.device} and values on {values.device}: both must be on one "
                "device."
            )
        dtype = torch.promote_types(keys.dtype, values.dtype)
        return cls(keys.shape[1], keys.shape[3], values.shape[3], dtype, keys.device)

    def check_next(self, layer_idx: int, new: "StateKind") -> None:
        """Refuse tokens that would be cut, broadcast or converted.

        Raises:
            ValueError: a property differs.
        """
        widths = (self.heads, self.key_width, self.value_width), (new.heads, new.key_width, new.value_width)
        if widths[0] != widths[1]:
            raise ValueError(
                f"Layer {layer_idx} holds tokens of (KV heads, key width, value width) = {widths[0]} and got some of "
                f"{widths[1]}. A cache serves one model: make another for this one, or call cache.reset() first."
            )
        if self.device != new.device:
            raise ValueError(
                f"Layer {layer_idx} holds tokens that came on {self.device}, and got some on {new.device}. Where the "
                "model has moved, make a new cache or call cache.reset() first."
            )
        if self.dtype != new.dtype:
            raise ValueError(
                f"Layer {layer_idx} holds its tokens in {self.dtype} and got some in {new.dtype}. Read the whole text "
                "in one type, all of it under torch.autocast or none of it, or call cache.reset() first."
            )


class Arrivals:
    """Checks the keys and values of each forward against the held ones.

    Attributes:
        kind: kind of the held tokens; None = none are held.

    Args:
        layer_idx: index of the layer, for messages.
    """

    def __init__(self, layer_idx: int) -> None:
        self.kind: StateKind | None = None
        self._layer_idx = layer_idx
        self._last: tuple[object, ...] = ()  # properties of the latest states that are quick to read

    def check(self, keys: Tensor, values: Tensor) -> StateKind:
        """Check the next keys and values, `[rows, kv_heads, tokens, width]`. Returns the kind of all tokens.

        Raises:
            TypeError, ValueError: see `StateKind`.
        """
        like = keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        if like != self._last or self.kind is None:
            kind = StateKind.of(self._layer_idx, keys, values)
            if self.kind is None:
                self.kind = kind
            self.kind.check_next(self._layer_idx, kind)
            self._last = like
        return self.kind
