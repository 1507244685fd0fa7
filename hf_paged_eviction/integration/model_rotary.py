"""The rotary embeddings of a model's layers, learned from the model's own code.

Configurations spell rotary embeddings in many ways, and models lay out the channels differently. The module of the
model defines both: a class makes cosines and sines from the configuration, and a function applies them. This module
calls the function with unit vectors. The result shows which channels rotate together, how fast, and in which direction.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from .models import is_latent_attention, rope_parameters
from .rotary import Rotary

#: Full-attention layers of these do not rotate; those that slide do.
_FULL_WITHOUT = {"afmoe", "cohere2", "cohere2_moe", "flint", "lara_mini"}
#: The same, but only where some layers slide.
_FULL_WITHOUT_IF_SLIDING = {"exaone4", "exaone4_5", "exaone_moe", "kolibri1"}
#: Rotary embeddings of other parts of a model.
_OTHER_PARTS = ("vision", "audio", "image", "video", "conformer", "linearscaling", "dynamicntk", "yarn")
#: Angles of these depend on the length of the text, not on the position alone.
_BY_LENGTH = ("dynamic", "longrope", "su")
#: Scaling that differs from 1 by less is none.
_ROUNDING = 1e-6
#: Positions at which a learned rotation is compared with the model's own function.
_PROBED = (0, 1, 2, 37, 1000)


class UnknownRotaryError(ValueError):
    """The rotation of a model cannot be learned. The message is the reason, as a part of a sentence."""


#: Learned rotations, by the content of the configuration.
_LEARNED: dict[tuple[Any, ...], "Rotary | UnknownRotaryError | None"] = {}
_MOST_LEARNED = 64


def layer_rotaries(config: Any, layers: Iterable[int], latents: bool = False) -> dict[int, Rotary | None]:
    """The rotation of each of these layers; None for a layer that does not rotate. Layers with equal rotations share
    one.

    Args:
        config: `model.config`.
        layers: indices in the model.
        latents: for a model that caches latents (MLA), the rotation of their rotary part. It can move them
            (`rotate_by`) but not undo the rotation, because some models reorder the channels before it.

    Raises:
        UnknownRotaryError: with the reason.
    """
    if is_latent_attention(config) and not latents:
        raise UnknownRotaryError("it caches latents (MLA) instead of rotated keys")
    text = config.get_text_config(decoder=True)
    types, rotates = getattr(text, "layer_types", None), _rotating(text)
    by_type: dict[str | None, Rotary | None] = {}
    by_layer: dict[int, Rotary | None] = {}
    for index in layers:
        kind = types[index] if types else None
        if not rotates(index):
            by_layer[index] = None
            continue
        if kind not in by_type:
            by_type[kind] = _learned_once(
                config, text, kind, text.qk_rope_head_dim if latents else head_dim(text, index)
            )
        by_layer[index] = by_type[kind]
    return by_layer


def known_rotaries(config: Any, layers: Iterable[int]) -> dict[int, Rotary | None]:
    """The rotations of these layers, or of the rotary part of their latents; an empty dictionary if they are not
    known."""
    try:
        return layer_rotaries(config, layers, latents=is_latent_attention(config))
    except UnknownRotaryError:
        return {}


def _rotating(text: Any) -> Callable[[int], bool]:
    """Says whether a layer rotates, as far as the configuration says that some do not; reads it once."""
    switches = getattr(text, "no_rope_layers", None)
    if switches:
        return lambda index: bool(switches[index])  # 1 = the layer rotates, despite the name
    bases = getattr(text, "layer_rope_theta", None)
    by_type = text.model_type not in _FULL_WITHOUT and (
        text.model_type not in _FULL_WITHOUT_IF_SLIDING or getattr(text, "sliding_window", None) is None
    )
    by_kind = getattr(text, "position_embedding_type", "rope") in ("rope", "rotary")
    any_rotates = by_type and by_kind and not getattr(text, "alibi", False) and getattr(text, "use_mem_rope", True)
    return lambda index: bool(any_rotates and not (bases and not bases[index]))


def _learned_once(config: Any, text: Any, kind: str | None, head_dim: int) -> Rotary | None:
    """Like `_learn`, but once for all equal configurations, because it runs the model's code many times."""
    key = type(config), repr(text.to_dict()), kind, head_dim
    if key not in _LEARNED:
        if len(_LEARNED) >= _MOST_LEARNED:
            _LEARNED.clear()
        try:
            with torch.device("cpu"):  # where the model's code makes tensors, too
                _LEARNED[key] = _learn(config, text, kind, head_dim)
        except UnknownRotaryError as error:
            _LEARNED[key] = error
    rotary = _LEARNED[key]
    if isinstance(rotary, UnknownRotaryError):
        raise rotary
    return rotary


def _learn(config: Any, text: Any, kind: str | None, head_dim: int) -> Rotary | None:
    module = _module(config, text)
    names = [name for name in vars(module) if "rotary" in name.lower() or re.search(r"(^|_)rope(_|$)", name.lower())]
    if not names:
        _refuse_methods(module)
        return None
    parameters = rope_parameters(text, kind)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type in _BY_LENGTH:
        raise UnknownRotaryError(f"its rotation ({rope_type}) depends on the length of the text")
    if "mrope_section" in parameters:
        raise UnknownRotaryError("its tokens have several positions each (mrope)")
    embedding = _embedding(module, text)
    frequencies = _frequencies(embedding, kind)
    if frequencies is None:
        return None
    apply = _application(module, embedding, kind)
    # The model hands its function the whole head, or the channels that turn.
    for width in dict.fromkeys([head_dim, 2 * len(frequencies)]):
        rotary = _layout(apply, frequencies, width)
        if rotary is not None:
            return rotary
    raise UnknownRotaryError("its code does not just rotate pairs of channels by position times frequency")


def _refuse_methods(module: Any) -> None:
    """RoFormer rotates in a method of its attention."""
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and any("rotary" in name for name in vars(value)):
            raise UnknownRotaryError(f"its {value.__name__} rotates by a method of its own")


def _module(config: Any, text: Any) -> Any:
    for part in (text, config):
        if type(part) in MODEL_MAPPING:
            entry = MODEL_MAPPING[type(part)]
            return sys.modules[(entry[0] if isinstance(entry, tuple) else entry).__module__]
    raise UnknownRotaryError("it is not one of the models of transformers")


def _embedding(module: Any, text: Any) -> nn.Module:
    """The model's own rotary embedding of the text."""
    classes: list[Any] = [
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding")
        and inspect.isclass(value)
        and "config" in inspect.signature(value).parameters
        and not any(part in name.lower() for part in _OTHER_PARTS)
    ]
    if len(classes) != 1:
        raise UnknownRotaryError(
            f"its module has {len(classes)} classes of rotary embeddings that take a configuration"
        )
    try:
        embedding: nn.Module = classes[0](config=text)
    except Exception as error:
        raise UnknownRotaryError(f"its {classes[0].__name__} cannot be made ({error})") from error
    return embedding


def _frequencies(embedding: nn.Module, kind: str | None) -> Tensor | None:
    """`[pairs]` float32; None where layers of this kind have none."""
    buffers = dict(embedding.named_buffers())
    if "inv_freq" in buffers:
        return buffers["inv_freq"].float()
    if any(name.endswith("_inv_freq") for name in buffers):
        own = buffers.get(f"{kind}_inv_freq")
        return None if own is None else own.float()
    raise UnknownRotaryError(f"its {type(embedding).__name__} does not say its frequencies")


#: states `[1, tokens, width]` of one head, position -> rotated
_Apply = Callable[[Tensor, int], Tensor]


def _application(module: Any, embedding: nn.Module, kind: str | None) -> _Apply:
    """The model's own rotation."""
    rotate = getattr(module, "apply_rotary_pos_emb", None) or getattr(module, "apply_rotary_emb", None)
    if rotate is None:
        raise UnknownRotaryError("its module has no apply_rotary_pos_emb")
    named = list(inspect.signature(rotate).parameters)
    by_kind = {"layer_type": kind} if "layer_type" in inspect.signature(embedding.forward).parameters else {}

    def apply(states: Tensor, position: int) -> Tensor:
        waves = embedding(states, torch.full(states.shape[:2], position, device="cpu"), **by_kind)
        if "freqs_cis" in named:  # complex numbers, heads after tokens
            return rotate(states[:, :, None], states[:, :, None], waves)[0][:, :, 0]  # type: ignore[no-any-return]
        if named[:3] == ["x", "cos", "sin"]:
            return rotate(states[:, None], *waves)[:, 0]  # type: ignore[no-any-return]
        if named[:4] == ["q", "k", "cos", "sin"]:
            return rotate(states[:, None], states[:, None], *waves)[0][:, 0]  # type: ignore[no-any-return]
        raise UnknownRotaryError(f"its {rotate.__name__} takes {', '.join(named)}, which is not known here")

    return apply


def head_dim(text: Any, index: int) -> int:
    layers = getattr(text, "per_layer_config", None)
    own = layers[index] if layers is not None and index < len(layers) else text
    return int(getattr(own, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _layout(apply: _Apply, frequencies: Tensor, width: int) -> Rotary | None:
    """The rotation that the function applies to heads of `width` channels; None if it is no rotation, or takes no such
    heads."""
    if width < 2 * len(frequencies):
        return None
    unit = torch.eye(width, device="cpu")[None]
    try:
        with torch.no_grad():
            images = {position: apply(unit, position)[0].float() for position in _PROBED}
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, UnknownRotaryError):
            raise
        return None
    once = images[1]
    if once.shape != (width, width):
        return None
    # Row `c` is what channel `c` becomes: its own share, and what it gives to its partner.
    own = once.diagonal()
    crossed = once - own.diag()
    turning = crossed.abs().amax(-1).nonzero()[:, 0].tolist()
    if not turning:
        return None
    distance = int(crossed[turning[0]].abs().argmax()) - turning[0]
    neighbours = distance == 1
    pairs = (turning[-1] + 1) // 2 if neighbours else distance
    if not 0 < 2 * pairs <= width:
        return None
    # Pairs between others may have the frequency 0.
    one = 2 * torch.arange(pairs, device="cpu") if neighbours else torch.arange(pairs, device="cpu")
    share = crossed[one, one + distance]
    angles = torch.atan2(share.abs(), own[one])
    nearest = frequencies.abs()[(angles[:, None] - frequencies.abs()).abs().argmin(-1)]
    scaling = torch.hypot(own[one], share)
    scaling = torch.where((scaling - 1).abs() < _ROUNDING, 1.0, scaling)
    rotary = Rotary(torch.where(share == 0, 0.0, nearest * share.sign()), scaling, neighbours)
    for position, image in images.items():
        own_image = rotary.rotate(unit[0], torch.tensor(position, device="cpu"))
        if not torch.allclose(own_image, image, rtol=0, atol=1e-4):
            return None
    return rotary
