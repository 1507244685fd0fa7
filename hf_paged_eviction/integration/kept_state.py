"""What a model keeps from one call to the next, besides its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Attributes of models that read images: how far positions are behind or ahead of columns in the last text, and what
#: else is needed to go on with it. They are None in a new model, and `generate` sets them when it begins a text.
_OF_POSITIONS = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")
#: Attributes that hold a recurrent state, which belongs into the cache.
_RECURRENT = ("conv1d_state", "recurrent_states")


def forget_last_text(model: Any) -> None:
    """Let the next forward number its tokens as in a new model, whatever the model has read before.

    `generate` does the same when it begins a text. Call it before every forward that is not part of `generate`, and
    before `generate` goes on with a text that was read by such forwards.
    """
    for attributes, name in _kept(model):
        attributes[name] = None


@contextmanager
def aside(model: Any) -> Iterator[None]:
    """Context manager around texts of their own: the model begins as new, and goes on afterwards as if nothing had been
    read."""
    before = [(attributes, name, attributes[name]) for attributes, name in _kept(model)]
    forget_last_text(model)
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes[name] = value


def check_states_in_cache(model: Any) -> None:
    """Raise ValueError if the model keeps its recurrent state itself, so that a copy of a cache does not have it."""
    for module in model.modules():
        if any(name in vars(module) for name in _RECURRENT):
            raise ValueError(
                f"{type(model).__name__} keeps a recurrent state in its {type(module).__name__} instead of the cache, "
                "so a text cannot be read in parts, nor be answered twice. Call generate with the whole prompt."
            )


def _kept(model: Any) -> list[tuple[dict[str, Any], str]]:
    parts = [module.__dict__ for module in model.modules()]
    return [(attributes, name) for attributes in parts for name in _OF_POSITIONS if name in attributes]
