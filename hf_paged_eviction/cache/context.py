"""Save a whole cache, and load it into the layers of a new cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ..allocators.limits import Limits
from ..layer import saved_layer
from ..layer.hybrid import HybridLayer
from ..layer.paged import PagedLayer
from ..masks.padding import Padding
from ..precision.codec import FORMAT
from ..tensors.parts import map_tensors, persistent
from ..tensors.saved import StateDict, restore, state_of
from . import files
from .facts import differences, dtype_name, model_facts, text_digests
from .other_layers import load_other, other_state

#: The devices of a cache: one, or one for each layer of the model.
Devices = torch.device | str | Sequence[torch.device | str]


# ---- saving ----------------------------------------------------------------------------------------------------------


def layer_state(index: int, layer: Any) -> StateDict:
    """The state of a layer of any kind.

    Raises:
        ValueError: tokens are pending, or the layer has a value that cannot be saved.
    """
    paged = isinstance(layer, PagedLayer)
    try:
        return {
            "paged": saved_layer.saved_state(layer) if paged else None,
            "other": other_state(layer) if not paged or isinstance(layer, HybridLayer) else None,
        }
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
    states = [layer_state(index, layer) for index, layer in enumerate(layers)]
    first = next((layer.state for layer in layers if isinstance(layer, PagedLayer)), None)
    if first is None or first.table is None:
        raise ValueError("There is nothing to save: no paged layer has seen a token.")
    dtype = dtype_name(config)
    content = {
        "model": model_facts(config),
        "weights": weights,
        "profile": profile or (None, None),
        # The configuration of a model that was converted after loading does not have its real dtype.
        "dtype": dtype if f"torch.{dtype}" == str(first.store.dtype) else None,
        "settings": settings,
        "codes": None if settings["bits"] is None else FORMAT,
        "rows": first.rows,
        "columns": first.seen,
        "text": None if input_ids is None else text_digests(input_ids, first.rows, first.seen),
        "written by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "state": {"layers": states, "padding": state_of(padding), "limits": limits.state_dict()},
    }
    files.write(path, content)


# ---- loading ---------------------------------------------------------------------------------------------------------


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Context manager: add the name of the file to errors about its content."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        reason = str(error) if not isinstance(error, KeyError) else f"it lacks {error}"
        raise ValueError(f"Cannot use the saved context {str(path)!r}: {reason.removesuffix('.')}.") from error


def read(
    path: str | Path, config: Any, input_ids: Tensor | None, weights: str | None, must_say: bool
) -> dict[str, Any]:
    """Read a file, as `save` wrote it, and check that it belongs to this model and text.

    Args:
        weights: digest of the present weights; None if it is not known.
        must_say: refuse a file without a digest of weights.

    Raises:
        ValueError: the file does not fit; the message says why. OSError: it cannot be read.
    """
    content = files.read(path)
    there, here = content["model"] | {"dtype": content["dtype"]}, model_facts(config) | {"dtype": dtype_name(config)}
    if differing := differences(there, here, "in the file", "here"):
        raise ValueError(f"it was made with another model ({differing})")
    saved = content["weights"]
    if saved is None and must_say:
        raise ValueError(
            "it does not say which weights it was made with, because it was saved without model=: load it with "
            "model.config, if you know that it is the same model"
        )
    if None not in (saved, weights) and saved != weights:
        raise ValueError(f"it was made with other weights of this shape: their digest is {saved}, here {weights}")
    if input_ids is not None:
        text, rows = content["text"], content["rows"]
        if text is None:
            raise ValueError(
                "it has no digest of its text, because it was saved without input_ids=: load it without input_ids="
            )
        digests = text_digests(input_ids, rows, content["columns"], repeated=True)
        if digests != [digest for digest in text for _ in range(len(digests) // rows)]:
            raise ValueError("input_ids does not begin with the text of this context")
    if content["codes"] not in (None, FORMAT):
        raise ValueError(
            "its tokens were rounded to few bits by another version of hf_paged_eviction, whose codes this version "
            "cannot read: make the context again, or use the version that wrote it"
        )
    return content


def load(
    content: Mapping[str, Any], layers: Sequence[Any], padding: Padding, limits: Limits, devices: Devices, static: bool
) -> list[bool | None]:
    """Restore the layers of a new cache from what `read` returned.

    Returns:
        The result of `saved_layer.load` for each paged layer.

    Raises:
        ValueError, KeyError: something does not fit. The new cache cannot be used then.
    """
    state, all_real = content["state"], []
    named = [devices] * len(layers) if isinstance(devices, torch.device | str) else devices
    places = [torch.device(device) for device in named]
    if not len(places) == len(layers) == len(state["layers"]):
        raise ValueError(f"device= names {len(places)} devices for {len(layers)} layers")
    first = next(device for device, layer in zip(places, layers, strict=True) if isinstance(layer, PagedLayer))
    restore(padding, _on(first, state["padding"]))
    limits.load_state(_on(first, state["limits"]))
    for layer, device, saved in zip(layers, places, state["layers"], strict=True):
        if isinstance(layer, PagedLayer):
            all_real.append(saved_layer.load(layer, _on(device, saved["paged"]), content["rows"], device))
        if isinstance(layer, HybridLayer) or not isinstance(layer, PagedLayer):
            load_other(_on(device, saved["other"]), layer, device, static)
    return all_real


def _on(device: torch.device, state: StateDict) -> StateDict:
    """Copies on the device, which may be written to inside and outside of `torch.inference_mode`."""
    return map_tensors(lambda tensor: persistent(tensor.to(device)), state)
