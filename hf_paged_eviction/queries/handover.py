"""Who gets the queries of an attention call.

A cache sees keys and values only. `PagedEvictionCache.update` leaves its layer here, per thread, with the tensors that
it returned. The attention call with these tensors finds the layer and shows it the queries; no other call does.
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..attention.parts import Extra
from ..masks.of_attention import MaskOwner
from .observer import Queries


class KeyOwner(MaskOwner, Protocol):
    """Gives masks to the attention implementation "paged_eviction", and gets its queries.

    The layer of a cache is one, or a recorder beside a layer; it calls `hand_over`.

    Attributes:
        layer_idx: index in the model.
        reads: whether `extra_attention` must be called.
        kv_unchanged: whether the last attention call got the keys and values of `hand_over` unchanged; attention sets
            it.
    """

    layer_idx: int
    kv_unchanged: bool
    reads: bool

    @property
    def waits(self) -> bool:
        """Whether it must get the queries before it can continue."""
        return True

    def extra_attention(self, queries: Queries, values: Tensor) -> Extra | None:
        """Called before the queries are compared with the keys of `hand_over`.

        The memory of these keys, and of `values`, may still be changed. Returns what attention reads in addition; None
        = nothing.
        """
        return None

    def attended(self, queries: Queries) -> None:
        """Called after the queries were compared with the keys of `hand_over`."""


@dataclass(frozen=True)
class _Update:
    """What an `update` returned, and whose keys they are.

    References are weak, because a forward that fails leaves them here and must not keep its tensors alive.
    """

    owner: "weakref.ref[KeyOwner]"
    keys: "weakref.ref[Tensor]"
    values: "weakref.ref[Tensor]"
    rows: int
    new: int
    tokens: int


class _Handover(threading.local):
    """What was handed over last and not attended to so far.

    While a graph is traced no forward fails, so `traced` may be an ordinary reference.
    """

    def __init__(self) -> None:  # once per thread: compiled code is guarded by what is there
        self.waiting: _Update | None = None
        self.traced: tuple[KeyOwner, Tensor] | None = None


_handover = _Handover()


def hand_over(owner: KeyOwner, keys: Tensor, values: Tensor, new: int) -> None:
    """Let the attention call with these keys, `[batch, heads, tokens, dim]`, show its queries to `owner`; `new`: number
    of tokens of this forward."""
    if torch.compiler.is_compiling():
        _handover.traced = owner, keys
    else:
        references = weakref.ref(owner), weakref.ref(keys), weakref.ref(values)
        _handover.waiting = _Update(*references, keys.shape[0], new, keys.shape[2])


def unattended(owners: Iterable[KeyOwner]) -> KeyOwner | None:
    """The owner, of these, whose keys have had no attention call yet; None = none."""
    waiting = None if _handover.waiting is None else _handover.waiting.owner()
    return None if waiting is None else next((owner for owner in owners if owner is waiting), None)


def forget_handover(owners: Iterable[KeyOwner] | None = None) -> None:
    """Forget the keys of these owners, which are empty again; None = of any."""
    if owners is None or unattended(owners) is not None:
        _handover.waiting = None


def from_outside() -> bool:
    """Whether, in a graph that is traced, the keys come from a cache outside of it."""
    return _handover.traced is None and _handover.waiting is not None


def receive(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyOwner | None:
    """Whom to tell of the queries that this module compares with this key; None = nobody.

    Raises:
        ValueError: the module adds keys of its own to those of an owner that needs the queries.
    """
    if torch.compiler.is_compiling():
        traced, _handover.traced = _handover.traced, None
        if traced is None:
            return None
        keys = traced[1]
        return traced[0] if keys is key or (keys.shape[0], keys.shape[2]) == (key.shape[0], key.shape[2]) else None
    update, _handover.waiting = _handover.waiting, None
    owner = None if update is None else update.owner()
    if update is None or owner is None:
        return None
    same = update.keys() is key
    owner.kv_unchanged = same and update.values() is value
    layer_idx, shape = getattr(module, "layer_idx", owner.layer_idx), (key.shape[0], query.shape[2])
    if same or layer_idx != owner.layer_idx or shape != (update.rows, update.new):
        return owner if same else None
    # Latent attention (MLA) compares with what it makes of what the cache returned. What a failed forward left behind
    # is forgotten when the next one builds its masks, so it does not come here.
    if key.shape[2] == update.tokens:
        return owner
    if owner.waits:
        raise ValueError(
            f"{type(module).__name__} compares its queries with {key.shape[2]} keys where the cache returned "
            f"{update.tokens}: it adds keys of its own, such as an encoder's, whose share of attention says nothing of "
            "the tokens in the cache, and no mask is made for them. Use a policy that needs no queries, "
            "allocator='uniform' and one number as budget."
        )
    return None
