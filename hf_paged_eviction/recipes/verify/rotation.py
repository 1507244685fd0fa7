"""Shows on a model itself whether its rotation (rotary embedding) is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...integration.cache_argument import cache_kwargs
from ...integration.model_rotary import UnknownRotaryError, layer_rotaries
from ...integration.models import layer_plan

#: Values that differ less than this, relative to their size, are the same.
_SAME = 1e-3


@dataclass(frozen=True)
class Rotation:
    """Whether the keys of a model can be unrotated, which policies such as Expected Attention need.

    Attributes:
        error: what remains of the rotation after it was undone, see `rotary_error`; None where nothing shows it.
        tolerance: largest error that counts as rounding.
        reason: why there is no error; may be empty.
    """

    error: float | None
    tolerance: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.error is None or self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"rotation of keys: not known ({self.reason}); policies that need it may be refused"
        said = "known" if self.ok else "WRONG"
        return f"rotation of keys: {said}, undoing it leaves {self.error:.1e} of it"


def look_at_rotation(model: Any) -> Rotation:
    """Undo the rotation of a model's keys. What goes wrong is part of the result."""
    tolerance = max(_SAME, 8 * torch.finfo(model.dtype).eps)
    try:
        if model.config.is_encoder_decoder:
            return Rotation(None, tolerance, "an encoder-decoder model")
        error = rotary_error(model)
    except UnknownRotaryError as unknown:
        return Rotation(None, tolerance, str(unknown))
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        return Rotation(None, tolerance, f"{type(problem).__name__}: {problem}")
    return Rotation(error, tolerance, "" if error is not None else "no layer shows it")


@torch.no_grad()
def rotary_error(model: Any, tokens: int = 48, token_id: int | None = None) -> float | None:
    """How far unrotated keys of equal tokens are from being equal, relative to their size, in the worst layer.

    Each attention layer is given the hidden state of its first token at all positions. Then its keys differ by their
    rotation alone, and undoing it must make them equal. In float32, 1e-4 or less shows that the rotation is right; a
    wrong one gives 0.1 or more. Layers that cannot be shown equal hidden states, as their values tell, are left out.

    Args:
        model: on its device; its keys are looked at as a plain cache gets them.
        tokens: length of the row, at least 2.
        token_id: the token, which is repeated; None = one from the middle of the vocabulary.

    Returns:
        The error; None where no layer shows anything.

    Raises:
        UnknownRotaryError: the rotation cannot be learned; the message is the reason.
    """
    layers = [index for index, layer in enumerate(layer_plan(model.config)) if layer is None]
    rotaries = layer_rotaries(model.config, layers)
    token_id = token_from_the_middle(model) if token_id is None else token_id
    ids = torch.full((1, tokens), token_id, device=model.get_input_embeddings().weight.device)
    cache = DynamicCache(config=model.config)
    with equal_states(model, set(rotaries)):
        model(input_ids=ids, use_cache=True, **cache_kwargs(model, cache))
    errors = []
    for index, rotary in rotaries.items():
        keys, values = cache.layers[index].keys, cache.layers[index].values
        if spread(values) > _tolerance(values):
            continue
        at = torch.arange(keys.shape[2], device=keys.device)
        errors.append(spread(keys if rotary is None else rotary.unrotate(keys, at)))
    return max(errors) if errors else None


def token_from_the_middle(model: Any) -> int:
    """Of the vocabulary: no special token."""
    return len(model.get_input_embeddings().weight) // 3


@contextmanager
def equal_states(model: torch.nn.Module, layers: set[int]) -> Iterator[None]:
    """Attention in these layers is given its first token's hidden state for all tokens."""

    def repeat(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": _repeated(kwargs["hidden_states"])}
        elif args:
            # CTRL hands them over three times, for queries, keys and values.
            args = tuple(_repeated(each) if each is args[0] else each for each in args)
        return args, kwargs

    hooks = [
        module.register_forward_pre_hook(repeat, with_kwargs=True)
        for module in model.modules()
        if getattr(module, "layer_idx", None) in layers and type(module).__name__.endswith("Attention")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _repeated(states: Any) -> Any:
    """`[1, tokens, hidden]`, the first token everywhere."""
    return states[:, :1].expand_as(states) if isinstance(states, Tensor) and states.ndim == 3 else states


def spread(states: Tensor) -> float:
    """Largest distance of a token from the first one, relative to the mean length; states `[1, heads, tokens, dim]`."""
    states = states.float()
    away = (states - states[:, :, :1]).norm(dim=-1).amax()
    return float(away / states.norm(dim=-1).mean().clamp_min(1e-20))


def _tolerance(states: Tensor) -> float:
    return max(_SAME, 4 * torch.finfo(states.dtype).eps)
