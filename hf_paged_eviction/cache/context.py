"""Save a whole cache, and load it into the layers of a new cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import transformers
from torch import Tensor

from ..allocators import BudgetAllocator
from ..allocators.limits import Limits
from ..allocators.registry import ALLOCATORS
from ..integration.models import is_latent_attention
from ..layer import saved_layer
from ..layer.hybrid import HybridLayer, paged_part
from ..layer.paged import PagedLayer
from ..masks.padding import Padding
from ..policies import EvictionPolicy
from ..policies.registry import POLICIES
from ..precision.codec import FORMAT
from ..tensors.saved import LONGEST, SavedState, StateDict, take_apart
from . import files
from .facts import check_text, config_dtype, differences, dtype_name, model_facts, text_facts
from .labels import check_profile, find_profile, made_of
from .other_layers import load_other, other_state

#: The devices of a cache: one, or one for each layer of the model.
Devices = torch.device | str | Sequence[torch.device | str]


# ---- saving ----------------------------------------------------------------------------------------------------------


def layer_state(index: int, layer: Any) -> StateDict | None:
    """The state of a layer of any kind; None = the layer has seen no token.

    Raises:
        ValueError: tokens are pending, or the layer has a value that cannot be saved.
    """
    try:
        if isinstance(layer, PagedLayer):
            return saved_layer.state_of(layer)
        if isinstance(layer, HybridLayer):
            return {"paged": saved_layer.state_of(layer.paged), "linear": other_state(layer)}
        return other_state(layer)
    except ValueError as error:
        raise ValueError(f"Cannot save layer {index}: {error}") from error


def save(
    path: str | Path,
    config: Any,
    settings: Mapping[str, Any],
    layers: Sequence[Any],
    padding: Padding,
    limits: Limits,
    input_ids: Tensor | None,
    weights: str | None,
    profile: tuple[str, str] | None,
) -> None:
    """Write a cache to a file.

    Args:
        config: `model.config`.
        settings: arguments that make such a cache, as JSON.
        layers, padding, limits: parts of the cache.
        input_ids: see `PagedEvictionCache.save`.
        weights: digest of the weights; None if it is not known.
        profile: file and digest, see `CheckedOptions.profile`.

    Raises:
        ValueError: the cache is empty, or see `layer_state`. TypeError, ValueError: `input_ids` are not the tokens of
            the cache. OSError: the file cannot be written.
    """
    state = {
        "layers": [layer_state(index, layer) for index, layer in enumerate(layers)],
        "padding": padding.state_dict(),
        "limits": limits.state_dict(),
    }
    first = next((part for part in map(paged_part, layers) if part is not None), None)
    if first is None or first.state.table is None:
        raise ValueError("There is nothing to save: no paged layer has seen a token.")
    rows, seen = first.state.rows, first.state.seen
    tree, tensors = take_apart(state)
    dtype, configured = dtype_name(first.dtype), config_dtype(config)
    content = {
        "model": model_facts(config),
        "weights": weights,
        "profile": None if profile is None else dict(zip(("file", "digest"), profile, strict=True)),
        # The configuration of a model that was converted after loading does not have its real dtype.
        "dtype": dtype if configured == dtype else None,
        "settings": dict(settings),
        "codes": None if settings["bits"] is None else FORMAT,
        "seen": seen,
        "rows": rows,
        "text": None if input_ids is None else text_facts(input_ids, rows, seen),
        "written by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "state": tree,
    }
    files.write(path, content, tensors)


def refuse_other_model(config: Any, other: Any) -> None:
    """Refuse `model=` if it is not the model that the cache was made for.

    Raises:
        ValueError: with what differs.
    """
    differing = differences(model_facts(config), model_facts(other))
    if differing:
        summary = "; ".join(differing).replace("in the file", "of this cache").replace("here", "of model=")
        raise ValueError(f"model= is another model than this cache was made for ({summary}).")


# ---- loading ---------------------------------------------------------------------------------------------------------


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Context manager: add the name of the file to errors about its content."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        reason = str(error) if not isinstance(error, KeyError) else f"it lacks {error}"
        raise ValueError(f"Cannot use the saved context {str(path)!r}: {reason.removesuffix('.')}.") from error


@dataclass(frozen=True)
class SavedContext:
    """The content of a file that belongs to the present model.

    Attributes:
        settings: arguments that make the cache.
        tree, tensors: state of the cache, see `take_apart`.
        seen, rows: number of tokens per row, and of rows.
        weights: digest of the weights that made the cache; None if it was not known.
    """

    settings: Mapping[str, Any]
    tree: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    seen: int
    rows: int
    weights: str | None


def read(
    path: str | Path,
    config: Any,
    input_ids: Tensor | None,
    policy: str | EvictionPolicy | None,
    allocator: str | BudgetAllocator | None,
    profile: str | None,
    weights: str | None,
    must_say: bool,
) -> SavedContext:
    """Read a file and check that it belongs to this model and text.

    Args:
        policy, allocator, profile: see `PagedEvictionCache.load`.
        weights: digest of the present weights; None if it is not known.
        must_say: refuse a file without a digest of weights.

    Raises:
        ValueError: the file does not fit; the message says why. OSError: it cannot be read.
    """
    content, tensors = files.read(path)
    header = SavedState(content, {}, torch.device("cpu"))
    dtype, configured = header.value("dtype", str, NoneType), config_dtype(config)
    differing = differences(header.value("model", dict), model_facts(config))
    if dtype is not None and configured is not None and dtype != configured:
        differing.append(f"dtype: {dtype!r} in the file, {configured!r} here")
    if differing:
        raise ValueError(f"it was made with another model ({'; '.join(differing)})")
    made_with = header.value("weights", str, NoneType)
    _check_weights(made_with, weights, must_say)
    text = None if content["text"] is None else _text_facts(header.part("text"))
    if input_ids is not None:
        if text is None:
            raise ValueError(
                "it has no digest of its text, because it was saved without input_ids=: load it without input_ids="
            )
        check_text(text, input_ids)
    settings = dict(header.value("settings", dict))
    if settings["bits"] is not None and content.get("codes") != FORMAT:
        raise ValueError(
            "its tokens were rounded to few bits by another version of hf_paged_eviction, whose codes this version "
            "cannot read: make the context again, or use the version that wrote it"
        )
    if isinstance(settings["bits"], str):
        raise ValueError(f"its precision, {settings['bits']!r}, cannot be loaded from a file")
    digest = None if content["profile"] is None else header.part("profile").value("digest", str)
    if digest is not None:
        profile = find_profile(settings["profile"], digest, profile, config)
    scorer = made_of(POLICIES, settings["policy"], policy, profile)
    divider = made_of(ALLOCATORS, settings["allocator"], allocator, profile)
    check_profile(digest, {**scorer.profile_digests, **divider.profile_digests})
    del settings["profile"]  # the objects have it
    settings["policy"], settings["allocator"] = scorer, divider
    rows, seen = header.number("rows", 1, LONGEST), header.number("seen", 1, LONGEST)
    return SavedContext(settings, header.value("state", dict), tensors, seen, rows, made_with)


def _text_facts(text: SavedState) -> dict[str, Any]:
    """What the file says of its text, see `text_facts`."""
    sizes = {name: text.number(name, 1, LONGEST) for name in ("rows", "columns")}
    return {**sizes, "sha256": text.value("sha256", str)}


def _check_widths(layers: Sequence[Any], config: Any) -> None:
    """Refuse keys and values of another width than that in the model's configuration, if it has one."""
    text = config.get_text_config(decoder=True)
    if is_latent_attention(config) or getattr(text, "global_head_dim", None) is not None:
        return
    own: Any = getattr(text, "per_layer_config", None) or [text] * len(layers)
    for layer, layer_config in zip(map(paged_part, layers), own, strict=False):
        width = getattr(layer_config, "head_dim", None)
        kind = None if layer is None else layer.state.arrivals.kind
        widths = set() if kind is None else {kind.key_width, kind.value_width}
        if kind is not None and isinstance(width, int) and widths != {width}:
            raise ValueError(f"its keys and values are {sorted(widths)} wide, and those of the model {width}")


def _check_weights(saved: str | None, weights: str | None, must_say: bool) -> None:
    if saved is None and must_say:
        raise ValueError(
            "it does not say which weights it was made with, because it was saved without model=: load it with "
            "model.config, if you know that it is the same model"
        )
    if None not in (saved, weights) and saved != weights:
        raise ValueError(f"it was made with other weights of this shape: their digest is {saved}, here {weights}")


def load(
    saved: SavedContext,
    config: Any,
    layers: Sequence[Any],
    padding: Padding,
    limits: Limits,
    devices: Devices,
    static: bool,
) -> list[bool | None]:
    """Restore the layers of a new cache from a file.

    Returns:
        The result of `saved_layer.load` for each paged layer.

    Raises:
        ValueError: something does not fit. The new cache cannot be used then.
    """
    places = _devices(devices, len(layers))
    first = next(at for at, layer in enumerate(layers) if paged_part(layer) is not None)
    state = SavedState(saved.tree, dict(saved.tensors), places[first])
    rows, seen = saved.rows, saved.seen
    padding.load_state(state.part("padding"), rows)
    limits.load_state(state.part("limits"), rows)
    all_real: list[bool | None] = []
    for part, layer in zip(state.parts("layers", places), layers, strict=True):
        if isinstance(layer, HybridLayer) and part is not None:
            all_real.append(saved_layer.load(layer.paged, part.part("paged"), rows, seen))
            load_other(part.part("linear"), layer, rows, static)
        elif isinstance(layer, PagedLayer) and part is not None:
            all_real.append(saved_layer.load(layer, part, rows, seen))
        elif part is not None:
            load_other(part, layer, rows, static)
        else:
            raise ValueError(f"it lacks a {type(layer).__name__} among its layers")
    state.finish()
    _check_widths(layers, config)
    return all_real


def _devices(devices: Devices, layers: int) -> list[torch.device]:
    if isinstance(devices, torch.device | str):
        return [torch.device(devices)] * layers
    if len(devices) != layers:
        raise ValueError(f"device= names {len(devices)} devices for {layers} layers")
    return [torch.device(device) for device in devices]
