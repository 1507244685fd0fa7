"""Save a whole cache, and load it into the layers of a new cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from ..allocators import BudgetAllocator
from ..allocators.limits import Limits
from ..layer import saved_layer
from ..layer.hybrid import HybridLayer
from ..layer.paged import PagedLayer
from ..masks.padding import Padding
from ..policies import EvictionPolicy
from ..precision.codec import FORMAT
from ..tensors.saved import StateDict, put_together, take_apart
from . import files
from .facts import check_text, config_dtype, differences, dtype_name, model_facts, text_facts
from .labels import choosers
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
        if isinstance(layer, HybridLayer):
            return {"paged": saved_layer.state_of(layer), "linear": other_state(layer)}
        return saved_layer.state_of(layer) if isinstance(layer, PagedLayer) else other_state(layer)
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
    first = next((layer for layer in layers if isinstance(layer, PagedLayer)), None)
    if first is None or first.state.table is None:
        raise ValueError("There is nothing to save: no paged layer has seen a token.")
    rows, seen = first.state.rows, first.state.seen
    tree, tensors = take_apart(state)
    dtype, configured = dtype_name(first.state.store.dtype), config_dtype(config)
    content = {
        "model": model_facts(config),
        "weights": weights,
        "profile": None if profile is None else dict(zip(("file", "digest"), profile, strict=True)),
        # The configuration of a model that was converted after loading does not have its real dtype.
        "dtype": dtype if configured == dtype else None,
        "settings": dict(settings),
        "codes": None if settings["bits"] is None else FORMAT,
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
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        reason = str(error) if not isinstance(error, KeyError) else f"it lacks {error}"
        raise ValueError(f"Cannot use the saved context {str(path)!r}: {reason.removesuffix('.')}.") from error


class SavedContext(NamedTuple):
    """The content of a file that belongs to the present model.

    Attributes:
        settings: arguments that make the cache.
        tree, tensors: state of the cache, see `take_apart`.
        rows: number of rows.
        weights: digest of the weights that made the cache; None if it was not known.
    """

    settings: dict[str, Any]
    tree: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
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
    dtypes, settings = {"dtype": content["dtype"]}, content["settings"]
    differing = differences(content["model"], model_facts(config))
    if None not in (content["dtype"], config_dtype(config)):
        differing += differences(dtypes, {"dtype": config_dtype(config)})
    if differing:
        raise ValueError(f"it was made with another model ({'; '.join(differing)})")
    _check_weights(content["weights"], weights, must_say)
    if input_ids is not None:
        if content["text"] is None:
            raise ValueError(
                "it has no digest of its text, because it was saved without input_ids=: load it without input_ids="
            )
        check_text(content["text"], input_ids)
    if content["codes"] not in (None, FORMAT):
        raise ValueError(
            "its tokens were rounded to few bits by another version of hf_paged_eviction, whose codes this version "
            "cannot read: make the context again, or use the version that wrote it"
        )
    settings["policy"], settings["allocator"] = choosers(content, policy, allocator, profile, config)
    del settings["profile"]  # policy and allocator have it
    return SavedContext(settings, content["state"], tensors, content["rows"], content["weights"])


def _check_weights(saved: str | None, weights: str | None, must_say: bool) -> None:
    if saved is None and must_say:
        raise ValueError(
            "it does not say which weights it was made with, because it was saved without model=: load it with "
            "model.config, if you know that it is the same model"
        )
    if None not in (saved, weights) and saved != weights:
        raise ValueError(f"it was made with other weights of this shape: their digest is {saved}, here {weights}")


def load(
    saved: SavedContext, layers: Sequence[Any], padding: Padding, limits: Limits, devices: Devices, static: bool
) -> list[bool | None]:
    """Restore the layers of a new cache from a file.

    Returns:
        The result of `saved_layer.load` for each paged layer.

    Raises:
        ValueError, KeyError: something does not fit. The new cache cannot be used then.
    """
    named = [devices] * len(layers) if isinstance(devices, torch.device | str) else devices
    places = [torch.device(device) for device in named]
    if not len(places) == len(layers) == len(saved.tree["layers"]):
        raise ValueError(f"device= names {len(places)} devices for {len(layers)} layers")
    first = next(device for device, layer in zip(places, layers, strict=True) if isinstance(layer, PagedLayer))
    for name, part in ("padding", padding), ("limits", limits):
        part.load_state(put_together(saved.tree[name], saved.tensors, first, name))
    all_real = []
    for index, (layer, device) in enumerate(zip(layers, places, strict=True)):
        state = put_together(saved.tree["layers"][index], saved.tensors, device, f"layers.{index}")
        if isinstance(layer, PagedLayer):
            paged = state["paged"] if isinstance(layer, HybridLayer) else state
            all_real.append(saved_layer.load(layer, paged, saved.rows, device))
        if isinstance(layer, HybridLayer) or not isinstance(layer, PagedLayer):
            load_other(state["linear"] if isinstance(layer, HybridLayer) else state, layer, device, static)
    return all_real
