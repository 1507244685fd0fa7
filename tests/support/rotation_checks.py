"""What a model alone shows: whether its rotation is known, and whether it sees distances alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction.integration.cache_argument import cache_kwargs
from hf_paged_eviction.integration.model_rotary import UnknownRotaryError, layer_rotaries
from hf_paged_eviction.integration.models import check_model, layer_plan, paged_layers
from hf_paged_eviction.integration.window import trained_window
from hf_paged_eviction.layer.build import rerotations_of
from hf_paged_eviction_eval.verify.subject import NotCovered, coarse, nudged

#: States that differ by less, relative to their size, are the same.
_SAME = 1e-3
#: Tokens of a text, and by how many positions it is moved to a place near by.
_TOKENS, _NEAR = 48, 37


class Verdict(NamedTuple):
    """Whether nothing is wrong, the error if one was measured, and a sentence."""

    ok: bool
    error: float | None
    text: str


def look(model: Any) -> tuple[Verdict, Verdict]:
    """Of its rotation and of `positions="cache"`. What goes wrong in the model is part of it."""
    looks: dict[str, Callable[[Any], Verdict]] = {
        "rotation of keys": look_at_rotation,
        'positions="cache"': look_at_positions,
    }
    verdicts = []
    for name, ask in looks.items():
        try:
            if model.config.is_encoder_decoder:
                raise NotCovered("an encoder-decoder model")
            verdicts.append(ask(model))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            kind = "" if isinstance(problem, (NotCovered, UnknownRotaryError)) else f"{type(problem).__name__}: "
            verdicts.append(Verdict(True, None, f"{name}: not possible, or not known ({kind}{problem})"))
    return verdicts[0], verdicts[1]


# ---- rotation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def look_at_rotation(model: Any) -> Verdict:
    """Whether keys can be unrotated, which policies such as Expected Attention need.

    Each attention layer is given the hidden state of its first token at all positions. Then its keys differ by their
    rotation alone, and undoing it must make them equal. In float32, 1e-4 or less shows that the rotation is right; a
    wrong one gives 0.1 or more. Layers that cannot be shown equal hidden states, as their values tell, are left out.

    Raises:
        UnknownRotaryError: the rotation cannot be learned; the message is the reason. NotCovered: no layer shows it.
    """
    rotaries = layer_rotaries(model.config, [at for at, layer in enumerate(layer_plan(model.config)) if layer is None])
    cache, errors = _equal_states(model, None, set(rotaries)), []
    for index, rotary in rotaries.items():
        keys, values = cache.layers[index].keys, cache.layers[index].values
        if _difference(values[:, :, :1], values) <= max(_SAME, 4 * torch.finfo(values.dtype).eps):
            at = torch.arange(keys.shape[2], device=keys.device)
            unrotated = keys if rotary is None else rotary.unrotate(keys, at)
            errors.append(_difference(unrotated[:, :, :1], unrotated))
    if not errors:
        raise NotCovered("no layer shows it")
    error = max(errors)
    ok = error <= max(_SAME, 8 * torch.finfo(model.dtype).eps)
    return Verdict(ok, error, f"rotation of keys: {_right(ok)}, undoing it leaves {error:.1e} of it")


@torch.no_grad()
def look_at_positions(model: Any) -> Verdict:
    """Whether held keys may be turned to other positions: turned keys are those that the model makes there, near by and
    beyond its window, and its logits do not change when a text is moved as a whole.

    Raises:
        ValueError: (also its kinds) the model is refused, with the reason. NotCovered: no layer evicts.
    """
    check_model(model.config)
    layers, far = paged_layers(model.config), (trained_window(model.config) or 0) + _NEAR
    if not layers:
        raise NotCovered("no layer of this model evicts")
    turnings = rerotations_of(model.config, layers)
    errors = [_turning_error(model, turnings, offset) for offset in (_NEAR, far)]
    error = None if None in errors else max(size for size in errors if size is not None)
    moved, rounding = _moved(model)
    # Models work out the angle of a far position in float32.
    tolerance = max(_SAME, 8 * torch.finfo(model.dtype).eps) + (far + _TOKENS) * 2.0**-22
    ok, why = moved <= max(tolerance, rounding), ""
    if error is None:
        reason = "no layer shows whether keys are turned rightly"
        return Verdict(ok, None, f'positions="cache": {reason}; moving a whole text moves its logits by {moved:.1e}')
    ok = ok and error <= tolerance
    for name, frequencies in model.named_buffers():
        if error > tolerance and name.endswith("inv_freq") and coarse(frequencies.dtype):
            why = (
                f" (the model's own rotary frequencies were rounded to {str(frequencies.dtype).removeprefix('torch.')} "
                "when it was turned to that type; load it with dtype= instead, which leaves them in float32)"
            )
    return Verdict(
        ok,
        max(error, moved),
        f'positions="cache": {_right(ok)}, turned keys are off by {error:.1e} of their size; moving a whole text moves '
        f"its logits by {moved:.1e}{why}",
    )


def _right(ok: bool) -> str:
    return "right" if ok else "WRONG"


def _turning_error(model: Any, turnings: dict[int, Any], offset: int) -> float | None:
    """How far keys turned by `offset` are from those of equal states so far on, in the worst layer that shows it."""
    near, far = (_equal_states(model, start, set(turnings)).layers for start in (0, offset))
    errors = []
    for at, turning in turnings.items():
        values = near[at].values
        if max(_difference(values, far[at].values), _difference(values[:, :, :1], values)) <= _SAME:
            moved = torch.full((1, 1, _TOKENS), offset, device=values.device)
            errors.append(_difference(turning.rotate_by(near[at].keys, moved), far[at].keys))
    return max(errors, default=None)


def _moved(model: Any) -> tuple[float, float]:
    """How much logits change when a text is moved as a whole, and how much they may by rounding alone."""
    ids = _random_ids(model, _TOKENS, 0)

    def logits(start: int) -> Tensor:
        at = torch.arange(start, start + _TOKENS, device=ids.device)[None]
        return model(input_ids=ids, position_ids=at, use_cache=False).logits.float()  # type: ignore[no-any-return]

    here = logits(0)
    scale = here.std().clamp_min(1e-20)
    moved = float((here - logits(_NEAR)).abs().amax() / scale)
    if not coarse(model.dtype):
        return moved, 0.0
    with nudged(model):
        return moved, float((here - logits(0)).abs().amax() / scale)


def _equal_states(model: Any, start: int | None, layers: set[int]) -> DynamicCache:
    """Of a text from this position on (None: as the model counts); attention in these layers is given the hidden state
    of the first token for all."""

    def repeat(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": _repeated(kwargs["hidden_states"])}
        # CTRL hands them over three times, for queries, keys and values.
        return tuple(_repeated(argument) if argument is args[0] else argument for argument in args), kwargs

    weight, cache = model.get_input_embeddings().weight, DynamicCache(config=model.config)
    ids = torch.full((1, _TOKENS), len(weight) // 3, device=weight.device)  # no special token
    at = None if start is None else torch.arange(start, start + _TOKENS, device=ids.device)[None]
    where = {} if at is None else {"position_ids": at}
    hooks = [
        module.register_forward_pre_hook(repeat, with_kwargs=True)
        for module in model.modules()
        if getattr(module, "layer_idx", None) in layers and type(module).__name__.endswith("Attention")
    ]
    try:
        model(input_ids=ids, use_cache=True, **where, **cache_kwargs(model, cache))
    finally:
        for hook in hooks:
            hook.remove()
    return cache


def _repeated(states: Any) -> Any:
    """`[1, tokens, hidden]`, the first token everywhere."""
    return states[:, :1].expand_as(states) if isinstance(states, Tensor) and states.ndim == 3 else states


def _difference(states: Tensor, others: Tensor) -> float:
    """Largest distance of a token's states `[1, heads, tokens, dim]`, relative to the mean length of the others."""
    away = (states.float() - others.float()).norm(dim=-1).amax()
    return float(away / others.float().norm(dim=-1).mean().clamp_min(1e-20))


def _random_ids(model: Any, count: int, seed: int) -> Tensor:
    """`[1, count]` int64, from the middle of the vocabulary."""
    weight, draw = model.get_input_embeddings().weight, torch.Generator().manual_seed(seed)
    return torch.randint(len(weight) // 4, len(weight) // 2 + 1, (1, count), generator=draw).to(weight.device)
