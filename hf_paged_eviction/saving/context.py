"""A whole cache as a snapshot, in a file, and back in the layers of a new cache."""

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
from ..allocators.registry import ALLOCATORS
from ..allocators.sharing import Sharing, SharingSnapshot
from ..integration.models import is_latent_attention
from ..layer.contents import PagedSnapshot
from ..layer.hybrid import HybridLayer, paged_part
from ..layer.paged import PagedLayer
from ..masks.padding import Padding, PaddingSnapshot
from ..parts import Snapshot
from ..policies import EvictionPolicy
from ..policies.registry import POLICIES
from ..precision.codec import FORMAT
from ..static.sliding import SlidingSnapshot, StaticSlidingLayer
from ..store.store import StoreSnapshot
from . import files
from .checks import check_padding, check_paged, check_sharing, check_sliding
from .facts import check_text, config_dtype, differences, dtype_name, model_facts, text_facts
from .labels import check_files, made_of
from .names import put_together, take_apart
from .other_layers import OtherSnapshot, check_other, restore_other, snapshot_other

#: Where a cache is to be: one device, or one for each layer of the model.
Devices = torch.device | str | Sequence[torch.device | str]


@dataclass(frozen=True)
class HybridSnapshot(Snapshot):
    """Both halves of a `HybridLayer`."""

    paged: PagedSnapshot
    linear: OtherSnapshot


@dataclass(frozen=True)
class CacheSnapshot(Snapshot):
    """All that a cache holds.

    Attributes:
        layers: in the order of the model; None = no token was seen.
        padding, sharing: what its layers share.
    """

    layers: list[Snapshot | None]
    padding: PaddingSnapshot
    sharing: SharingSnapshot | None


# ---- saving ----------------------------------------------------------------------------------------------------------


def snapshot_layer(index: int, layer: Any) -> Snapshot | None:
    """All that a layer of any kind holds.

    Raises:
        ValueError: tokens wait for `crop`, or some of it cannot be written down.
    """
    try:
        if isinstance(layer, PagedLayer | StaticSlidingLayer):
            return layer.snapshot()
        if isinstance(layer, HybridLayer):
            return HybridSnapshot(layer.paged.snapshot(), snapshot_other(layer))
        return snapshot_other(layer)
    except ValueError as error:
        raise ValueError(f"Cannot save layer {index}: {error}") from error


def snapshot(layers: Sequence[Any], padding: Padding, sharing: Sharing | None) -> CacheSnapshot:
    """All that a cache holds.

    Raises:
        ValueError: see `snapshot_layer`.
    """
    held = [snapshot_layer(index, layer) for index, layer in enumerate(layers)]
    return CacheSnapshot(held, padding.snapshot(), None if sharing is None else sharing.snapshot())


def save(
    path: str | Path,
    config: Any,
    settings: Mapping[str, Any],
    snapshot: CacheSnapshot,
    input_ids: Tensor | None,
    weights: str | None,
    policy_files: Mapping[str, str],
) -> None:
    """Write a cache to a file.

    Args:
        config: of the model.
        settings: arguments that make such a cache anew, as JSON.
        input_ids: see `PagedEvictionCache.save`.
        weights: digest of the weights; None where it is not known.
        policy_files: of policy and allocator, see `EvictionPolicy.file_digests`.

    Raises:
        ValueError: it is empty. TypeError, ValueError: these are not its tokens. OSError: it cannot be written.
    """
    paged = [saved for saved in map(_paged_snapshot, snapshot.layers) if saved is not None]
    if not paged or paged[0].table is None or paged[0].store is None:
        raise ValueError("There is nothing to save: no layer that evicts has seen a token.")
    held, seen = paged[0].store, paged[0].table.counters.seen
    tree, tensors = take_apart(snapshot)
    dtype, said = dtype_name(held.dtype), config_dtype(config)
    content = {
        "model": model_facts(config),
        "weights": weights,
        "policy_files": dict(policy_files),
        # Where a model was converted after it was loaded, its configuration does not tell its precision.
        "dtype": dtype if said == dtype else None,
        "settings": dict(settings),
        "codes": None if settings["bits"] is None else FORMAT,
        "seen": seen,
        "rows": held.shape[0],
        "text": None if input_ids is None else text_facts(input_ids, held.shape[0], seen),
        "written by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "state": tree,
    }
    files.write(path, content, tensors)


def refuse_other_model(config: Any, other: Any) -> None:
    """Refuse to name another model than the one that a cache was made for.

    Raises:
        ValueError: with what differs.
    """
    differing = differences(model_facts(config), model_facts(other))
    if differing:
        told = "; ".join(differing).replace("in the file", "of this cache").replace("here", "of model=")
        raise ValueError(f"model= is another model than this cache was made for ({told}).")


def _paged_snapshot(saved: Snapshot | None) -> PagedSnapshot | None:
    if isinstance(saved, HybridSnapshot):
        return saved.paged
    return saved if isinstance(saved, PagedSnapshot) else None


# ---- loading ---------------------------------------------------------------------------------------------------------


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Errors of what stands in a file name the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        reason = str(error) if not isinstance(error, KeyError) else f"it lacks {error}"
        raise ValueError(f"Cannot use the saved context {str(path)!r}: {reason.removesuffix('.')}.") from error


@dataclass(frozen=True)
class SavedContext:
    """A file that was read and belongs to the model at hand.

    Attributes:
        settings: arguments that make a cache for it.
        snapshot: what the cache held.
        seen, rows: tokens per row, and rows.
        weights: digest of those that it was made with; None where it was not known.
    """

    settings: Mapping[str, Any]
    snapshot: CacheSnapshot
    seen: int
    rows: int
    weights: str | None

    @property
    def all_real(self) -> list[bool | None]:
        """By paged layer, see `PagedSnapshot`."""
        return [saved.all_real for saved in map(_paged_snapshot, self.snapshot.layers) if saved is not None]


def read(
    path: str | Path,
    config: Any,
    input_ids: Tensor | None,
    policy: str | EvictionPolicy | None,
    allocator: str | BudgetAllocator | None,
    weights: str | None,
    must_say: bool,
) -> SavedContext:
    """Read a file, for this model and text.

    Args:
        weights: digest of those at hand; None where it is not known.
        must_say: refuse a file that does not say with which weights it was made.

    Raises:
        ValueError: with what does not fit. OSError: it cannot be read.
    """
    content, tensors = files.read(path)
    _check_content(content)
    dtype, said = content["dtype"], config_dtype(config)
    differing = differences(content["model"], model_facts(config))
    if dtype is not None and said is not None and dtype != said:
        differing.append(f"dtype: {dtype!r} in the file, {said!r} here")
    if differing:
        raise ValueError(f"it was made with another model ({'; '.join(differing)})")
    _check_weights(content["weights"], weights, must_say)
    if input_ids is not None:
        if content["text"] is None:
            raise ValueError("it does not say what its text was: it was saved without input_ids=, so load it without")
        check_text(content["text"], input_ids)
    settings = dict(content["settings"])
    if settings["bits"] is not None and content.get("codes") != FORMAT:
        raise ValueError(
            "its tokens were rounded to few bits by another version of hf_paged_eviction, whose codes this one cannot "
            "read: make the context anew, or use the version that wrote it"
        )
    if isinstance(settings["bits"], str):
        raise ValueError(f"its precision, {settings['bits']!r}, is none that a file can hold")
    made = made_of(POLICIES, settings["policy"], policy), made_of(ALLOCATORS, settings["allocator"], allocator)
    settings["policy"], settings["allocator"] = made
    check_files(content["policy_files"], {**made[0].file_digests, **made[1].file_digests})
    if settings["sink_tokens"] is None:  # one block, whatever the policy was published with
        settings["sink_tokens"] = settings["block_size"]
    snapshot = put_together(CacheSnapshot, content["state"], tensors)
    _check_widths(snapshot, config)
    return SavedContext(
        settings,
        snapshot,
        content["seen"],
        content["rows"],
        content["weights"],
    )


#: What stands in a file beside its state, and of which kinds it may be.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "model": (dict,),
    "weights": (str, NoneType),
    "policy_files": (dict,),
    "dtype": (str, NoneType),
    "settings": (dict,),
    "seen": (int,),
    "rows": (int,),
    "text": (dict, NoneType),
    "state": (dict,),
}
_TEXT_KINDS: Mapping[str, tuple[type, ...]] = {"rows": (int,), "columns": (int,), "sha256": (str,)}


def _check_content(content: Mapping[str, Any]) -> None:
    _check_kinds(content, _KINDS)
    if content["text"] is not None:
        _check_kinds(content["text"], _TEXT_KINDS)
        if min(content["text"]["rows"], content["text"]["columns"]) < 1:
            raise ValueError("its text has no tokens")


def _check_kinds(table: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    for name, allowed in kinds.items():
        if type(table[name]) not in allowed:
            raise ValueError(f"{name} is {str(table[name])[:60]!r}, which it cannot be")


def _check_widths(snapshot: CacheSnapshot, config: Any) -> None:
    """Refuse keys and values that the model could not go on with, where its configuration says how wide they are."""
    text = config.get_text_config(decoder=True)
    if is_latent_attention(config) or getattr(text, "global_head_dim", None) is not None:
        return
    own: Any = getattr(text, "per_layer_config", None) or [text] * len(snapshot.layers)
    for saved, known in zip(map(_paged_snapshot, snapshot.layers), own, strict=False):
        width, store = getattr(known, "head_dim", None), None if saved is None else saved.store
        if isinstance(width, int) and isinstance(store, StoreSnapshot):
            found = {states.shape[-1] for states in (store.keys, store.values) if states.ndim}
            if found != {width}:
                raise ValueError(f"its keys and values are {sorted(found)} wide, and those of the model {width}")


def _check_weights(saved: str | None, weights: str | None, must_say: bool) -> None:
    if saved is None and must_say:
        raise ValueError(
            "it does not say which weights it was made with, because it was saved without model=: load it with "
            "model.config, if you know that it is the same model"
        )
    if None not in (saved, weights) and saved != weights:
        raise ValueError(f"it was made with other weights of this shape: their digest is {saved}, here {weights}")


def restore(
    saved: SavedContext,
    layers: Sequence[Any],
    padding: Padding,
    sharing: Sharing | None,
    devices: Devices,
    static: bool,
) -> None:
    """Give the layers of a new cache what those of the saved one held, once all of it has been checked.

    Raises:
        ValueError: something does not fit; nothing has changed then.
    """
    places = _devices(devices, len(layers))
    if len(saved.snapshot.layers) != len(layers):
        raise ValueError(f"it has {len(saved.snapshot.layers)} layers, and the model {len(layers)}")
    if not 0 < saved.rows == _rows(saved.snapshot):
        raise ValueError(f"it says that it has {saved.rows} rows, and its tensors have {_rows(saved.snapshot)}")
    pairs = list(zip(saved.snapshot.layers, layers, strict=True))
    for index, (each, layer) in enumerate(pairs):
        try:
            _check_layer(each, layer, saved.rows, saved.seen)
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from error
    check_padding(saved.snapshot.padding, saved.rows, saved.seen)
    if (sharing is None) != (saved.snapshot.sharing is None):
        raise ValueError("its layers share a budget out, or not, as those of this cache do not")
    first, size = next((at, part.budget.block_size) for at, part in enumerate(map(paged_part, layers)) if part)
    if sharing is not None and saved.snapshot.sharing is not None:
        count = sum(paged_part(layer) is not None for layer in layers)
        check_sharing(saved.snapshot.sharing, count, saved.rows, size)
        sharing.restore(saved.snapshot.sharing, places[first])
    padding.restore(saved.snapshot.padding, places[first])
    for (each, layer), device in zip(pairs, places, strict=True):
        _restore_layer(each, layer, device, static)


def _devices(devices: Devices, layers: int) -> list[torch.device]:
    if isinstance(devices, torch.device | str):
        return [torch.device(devices)] * layers
    if len(devices) != layers:
        raise ValueError(f"device= names {len(devices)} devices for {layers} layers")
    return [torch.device(device) for device in devices]


def _rows(snapshot: CacheSnapshot) -> int:
    stores = (saved.store for saved in map(_paged_snapshot, snapshot.layers) if saved is not None)
    return next((store.shape[0] for store in stores if store is not None and len(store.shape)), 0)


def _check_layer(saved: Snapshot | None, layer: Any, rows: int, seen: int) -> None:
    if isinstance(layer, PagedLayer) and isinstance(saved, PagedSnapshot):
        check_paged(saved, layer, rows, seen)
    elif isinstance(layer, HybridLayer) and isinstance(saved, HybridSnapshot):
        check_paged(saved.paged, layer.paged, rows, seen)
        check_other(saved.linear, layer, rows)
    elif isinstance(layer, StaticSlidingLayer) and isinstance(saved, SlidingSnapshot):
        check_sliding(saved, layer, rows, seen)
    elif isinstance(saved, OtherSnapshot) and not isinstance(layer, PagedLayer | HybridLayer | StaticSlidingLayer):
        check_other(saved, layer, rows)
    elif not (isinstance(layer, StaticSlidingLayer) and saved is None):
        raise ValueError(f"it is a {type(layer).__name__} here, and in the file a {type(saved).__name__}")


def _restore_layer(saved: Snapshot | None, layer: Any, device: torch.device, static: bool) -> None:
    if isinstance(saved, HybridSnapshot):
        restore_other(saved.linear, layer, device, static)
        layer.paged.restore(saved.paged, device)
    elif isinstance(saved, OtherSnapshot):
        restore_other(saved, layer, device, static)
    elif saved is not None:
        layer.restore(saved, device)
