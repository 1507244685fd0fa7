"""A warning when a text becomes longer than the model was trained for."""

import warnings
from collections.abc import Sequence
from typing import Any

from .model_rotary import UnknownRotaryError, layer_rotaries
from .models import is_latent_attention, rope_parameters


def trained_window(config: Any) -> int | None:
    """Number of tokens of the longest text that the model was made for; None if its configuration does not say.

    If the configuration stretches positions (yarn and similar methods), the stretched length counts.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "max_position_embeddings", None)
    if not isinstance(window, int) or window <= 0:
        return None
    rope = rope_parameters(text)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return max(window, round(original * factor)) if original and factor else window


class Window:
    """Warns once when distances become longer than the model was made for.

    Args:
        config: `model.config`.
        layers: indices of the layers that evict.
        in_text: whether held tokens keep their positions in the text.

    Attributes:
        tokens: length of the longest text that needs no warning; `inf` after the warning.
    """

    def __init__(self, config: Any, layers: Sequence[int], in_text: bool) -> None:
        self._config, self._layers, self._in_text = config, list(layers), in_text
        window = trained_window(config) if layers else None
        self.tokens: float = float("inf") if window is None else window

    def __deepcopy__(self, memo: Any) -> "Window":
        return self  # a copied cache serves the same model, whose user has been warned

    def check(self, length: int, offset: int, stacklevel: int) -> None:
        """Warn if a distance is too long: there are `length` keys, and the newest is `length + offset` tokens from the
        start."""
        if length + (offset if self._in_text else 0) <= self.tokens:
            return
        window, self.tokens = self.tokens, float("inf")
        way_out = self._way_out()
        if way_out is not None:
            kind = self._config.get_text_config(decoder=True).model_type
            warnings.warn(
                f"Attention now reaches further than the {window} tokens that this {kind} model was made for, so "
                f"its answers may get worse. {way_out}",
                stacklevel=stacklevel + 1,
            )

    def _way_out(self) -> str | None:
        """None where distances do not matter, because no layer that evicts rotates its keys."""
        if not self._in_text:
            return "Use a smaller budget, or feed fewer tokens at a time (prefill_chunk_size=)."
        try:
            rotaries = layer_rotaries(self._config, self._layers, latents=is_latent_attention(self._config))
        except UnknownRotaryError as error:
            return f'Its keys cannot be moved closer (positions="cache"): {error}.'
        if not any(rotaries.values()):
            return None
        return 'PagedEvictionCache(..., positions="cache") keeps the tokens held within the budget of each other.'
