"""Shows on a model itself whether its attention sees distances alone, so that what is held may be turned."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...integration.cache_argument import cache_kwargs
from ...integration.models import check_model, paged_layers
from ...integration.window import trained_window
from ...layer.build import turnings_of
from .rotation import equal_states, spread, token_from_the_middle
from .rounding import coarse, nudged

#: Relative to the size of keys, and in standard deviations of the logits.
_SAME = 1e-3
_NEAR = 37
_TOKENS = 24


@dataclass(frozen=True)
class Distances:
    """Whether `positions="cache"` is right for a model.

    Attributes:
        error: how far turned keys are from those that the model itself makes at the other positions, relative to their
            size, close by and beyond its window; None where that was not seen.
        moved: how much the logits of a text change when all of its positions are moved by the same number, in standard
            deviations of the logits; None where that was not seen.
        tolerance: largest `error` that counts as rounding.
        rounding: largest `moved` that does.
        reason: why there is no `error`; such a model is refused with it, or it was not looked at. Or why it is large.
    """

    error: float | None
    moved: float | None
    tolerance: float
    reason: str = ""
    rounding: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        limits = (self.error, self.tolerance), (self.moved, max(self.tolerance, self.rounding))
        return all(found is None or found <= limit for found, limit in limits)

    def __str__(self) -> str:
        if self.error is None or self.moved is None:
            return f'positions="cache": not possible, or not known ({self.reason})'
        said = "right" if self.ok else "WRONG"
        why = f" ({self.reason})" if self.reason else ""
        return (
            f'positions="cache": {said}, turned keys are off by {self.error:.1e} of their size; moving a whole text '
            f"moves its logits by {self.moved:.1e}{why}"
        )


def look_at_distances(model: Any) -> Distances:
    """Turn the keys of a model, and move a text. What goes wrong is part of the result."""
    far = (trained_window(model.config) or 0) + _NEAR
    # Models work out the angle of a far position in float32.
    tolerance = max(_SAME, 8 * torch.finfo(model.dtype).eps) + (far + _TOKENS) * 2.0**-22
    if model.config.is_encoder_decoder:
        return Distances(None, None, tolerance, "an encoder-decoder model")
    try:
        check_model(model.config)
        layers = paged_layers(model.config)
        if not layers:
            return Distances(None, None, tolerance, "no layer of this model evicts")
        turnings = turnings_of(model.config, layers)
        errors = [_turning_error(model, turnings, offset) for offset in dict.fromkeys((_NEAR, far))]
        moved, rounding = _moved(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        # The first line of our own refusals is the reason.
        return Distances(None, None, tolerance, f"{type(problem).__name__}: {problem}")
    seen = [error for error in errors if error is not None]
    if len(seen) < len(errors):
        return Distances(None, moved, tolerance, "no layer shows it", rounding)
    return Distances(
        max(seen), moved, tolerance, _rounded_frequencies(model) if max(seen) > tolerance else "", rounding
    )


def _rounded_frequencies(model: Any) -> str:
    """Why keys are turned wrongly if `model.to()` rounded the frequencies along with the weights."""
    for name, numbers in model.named_buffers():
        if name.endswith("inv_freq") and coarse(numbers.dtype):
            return (
                f"the model's own rotary frequencies were rounded to {str(numbers.dtype).removeprefix('torch.')} when "
                "it was turned to that type; load it with dtype= instead, which leaves them in float32"
            )
    return ""


@torch.no_grad()
def _turning_error(model: Any, turnings: dict[int, Any], offset: int) -> float | None:
    """How far keys turned by `offset` are from those of equal hidden states at positions that far on; the worst layer
    that shows it, None where none does."""
    ids = torch.full((1, _TOKENS), token_from_the_middle(model), device=model.get_input_embeddings().weight.device)
    caches = []
    for start in (0, offset):
        at = torch.arange(start, start + _TOKENS, device=ids.device)[None]
        cache = DynamicCache(config=model.config)
        with equal_states(model, set(turnings)):
            model(input_ids=ids, position_ids=at, use_cache=True, **cache_kwargs(model, cache))
        caches.append(cache)
    errors = []
    for index, turning in turnings.items():
        near, far = (cache.layers[index].keys for cache in caches)
        still = [cache.layers[index].values for cache in caches]
        if _difference(*still) > _SAME or spread(still[0]) > _SAME:
            continue  # this layer was not given equal hidden states
        errors.append(_difference(turning.rotary.rotate_by(near, torch.full_like(ids[:, None], offset)), far))
    return max(errors) if errors else None


@torch.no_grad()
def _moved(model: Any) -> tuple[float, float]:
    """How much logits change when a text is moved as a whole, and how much they may by rounding alone."""
    device, count = model.get_input_embeddings().weight.device, len(model.get_input_embeddings().weight)
    ids = torch.randint(count // 4, count // 2 + 1, (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(device)

    def logits(start: int) -> Tensor:
        at = torch.arange(start, start + _TOKENS, device=device)[None]
        found: Tensor = model(input_ids=ids, position_ids=at, use_cache=False).logits
        return found.float()

    here = logits(0)
    scale = here.std().clamp_min(1e-20)
    moved = float((here - logits(_NEAR)).abs().amax() / scale)
    if not coarse(model.dtype):
        return moved, 0.0
    with nudged(model):
        return moved, float((here - logits(0)).abs().amax() / scale)


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest distance of a token's states, relative to their mean length."""
    away = (one.float() - other.float()).norm(dim=-1).amax()
    return float(away / other.float().norm(dim=-1).mean().clamp_min(1e-20))
