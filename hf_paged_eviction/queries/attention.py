"""The attention implementation "paged_eviction": sdpa that shows the queries to the cache.

A cache sees keys and values only. `PagedEvictionCache.update` leaves its layer here, per thread, with the tensors that
it returned. The attention call with these tensors finds the layer and shows it the queries; no other call does. Layers
that share keys may attend to them again. If only the layer of the keys can mask them, its mask is stored on the tensor.
Registering the name changes nothing for models that do not use it.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ..attention.in_place import Reader, carried
from ..attention.parts import Part, Read, join, read
from ..attention.weights import Logits
from ..autocast import autocast_on, without_autocast
from ..graphs import leave_graphs
from ..integration.cache_argument import CACHE_NAMES
from ..masks.of_attention import (
    additive,
    as_bias,
    biased,
    check_own_mask,
    fitting,
    is_causal,
    last_rows,
    marked_mask,
    own_mask,
    per_query_head,
)
from .observer import Queries
from .owner import KeyOwner

#: For `model.set_attn_implementation` and `from_pretrained(attn_implementation=...)`.
PAGED_EVICTION = "paged_eviction"

#: Keyword arguments of attention calls that sdpa may ignore, because they change nothing or the mask says the same.
#: Some are those of `generate`, which come with the arguments of the model.
HARMLESS = frozenset(
    {
        "assistant_model",
        "assistant_tokenizer",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "debug_io",
        "deterministic",
        "dropout",
        "generation_config",
        "is_causal",
        "logits_processor",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "stop_strings",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "use_cache",
        *CACHE_NAMES,
    }
)

#: What the names of arguments contain that change what attention says: numbers that are added to logits, bound or scale
#: them, and choices of keys beyond those of the mask. Of the second kind they contain whole words.
_CHANGING = "alibi", "bias", "dropout", "indices", "mask", "sink", "slope", "softcap", "temperature", "topk"
_CHANGING_WORDS = frozenset("cap capping mod rel relative scale scales window".split())
#: How the names of arguments begin that say what else to return.
_OF_OUTPUTS = "output_", "return_"


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


class ModelAttention:
    """The attention implementation that a model uses now; it may change after the cache was made.

    Attributes:
        config: config of the text part of the model.
        shows_queries: whether it is "paged_eviction", as of the last `look`.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.look()

    def look(self) -> None:
        """Update `shows_queries`. Called once per forward, because reading a configuration is slow."""
        self.shows_queries: bool = self.config._attn_implementation == PAGED_EVICTION

    @property
    def name(self) -> str | None:
        """Name of the implementation, such as "sdpa"."""
        name: str | None = self.config._attn_implementation
        return name

    @property
    def has_masks(self) -> bool:
        """Whether transformers builds masks for this implementation."""
        return self.name in AttentionMaskInterface()

    def __deepcopy__(self, memo: Any) -> "ModelAttention":
        return self  # a copied cache serves the same model


@contextmanager
def shown_queries(config: Any) -> Iterator[None]:
    """Context manager: the cache assumes that the attention of a model with this configuration shows its queries."""
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = PAGED_EVICTION
    try:
        yield
    finally:
        text._attn_implementation = before


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


def forget_handover(owners: Iterable[KeyOwner]) -> None:
    """Forget the keys of these owners, which are empty again."""
    if unattended(owners) is not None:
        _handover.waiting = None


def _receive(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyOwner | None:
    """Whom to tell of the queries that this module compares with this key; None = nobody."""
    if torch.compiler.is_compiling():
        return _receive_traced(key)
    update, _handover.waiting = _handover.waiting, None
    owner = None if update is None else update.owner()
    if update is None or owner is None:
        return None
    same = update.keys() is key
    owner.kv_unchanged = same and update.values() is value
    if same or _worked_out_from(update, owner, module, query, key):
        return owner
    if owner.waits and _comes_from(update, owner, module, query, key):
        raise ValueError(
            f"{type(module).__name__} compares its queries with {key.shape[2]} keys where the cache returned "
            f"{update.tokens}: it adds keys of its own, such as an encoder's, whose share of attention says nothing of "
            "the tokens in the cache, and no mask is made for them. Use a policy that needs no queries, "
            "allocator='uniform' and one number as budget."
        )
    return None


def _worked_out_from(update: _Update, owner: KeyOwner, module: torch.nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether this may be the attention call that `update` was made for, with keys that the model worked out itself.

    Latent attention (MLA) compares with what it makes of what the cache returned. What a failed forward left behind is
    forgotten when the next one builds its masks (`_build_mask`), so it does not come here.
    """
    return _comes_from(update, owner, module, query, key) and key.shape[2] == update.tokens


def _comes_from(update: _Update, owner: KeyOwner, module: torch.nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether layer, rows and queries of this attention call are those of `update`."""
    same_layer = getattr(module, "layer_idx", owner.layer_idx) == owner.layer_idx
    return bool(same_layer and (key.shape[0], query.shape[2]) == (update.rows, update.new))


def _receive_traced(key: Tensor) -> KeyOwner | None:
    traced, _handover.traced = _handover.traced, None
    if traced is None:
        return None
    owner, keys = traced
    return owner if keys is key or (keys.shape[0], keys.shape[2]) == (key.shape[0], key.shape[2]) else None


def paged_eviction_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, with the signature that transformers expects.

    Args:
        query: `[batch, query_heads, q, dim]`.
        key, value: `[batch, kv_heads, tokens, dim]`.
        attention_mask: bool or additive, broadcastable to `[batch, query_heads, q, tokens]`; None = causal.
        softcap, s_aux: soft-capping and attention sinks; such models compute with their own eager function.

    Raises:
        ValueError: the model passes an argument that sdpa would ignore, or a mask that fits no layer.
    """
    if torch.compiler.is_compiling() and _handover.traced is None and _handover.waiting is not None:
        leave_graphs()  # the keys come from a cache that is outside, too
    check_understood(module, kwargs)
    owner = _receive(module, query, key, value)
    if query.dtype != key.dtype and autocast_on(query.device):  # tokens came before autocast was on
        query = query.to(key.dtype)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = Queries(query, key, Logits(scaling, softcap, s_aux))
    if not key.shape[2]:
        return _read_in_place(module, carried(key), owner, queries, attention_mask, dropout), None
    if owner is not None and owner.masks_itself and not (attention_mask is None and owner.all_new):
        key.seen_by_queries = _Seen(own_mask(attention_mask, owner, query.shape[2]))  # type: ignore[attr-defined]
    seen = getattr(key, "seen_by_queries", None)
    if seen is not None:
        attention_mask = seen.mask if seen.mask is None else seen.mask[:, :, -query.shape[2] :]
        kwargs["is_causal"] = False  # some models work it out from the mask that was not used
    else:
        attention_mask = fitting(attention_mask, owner, query, key)
        if attention_mask is None and 1 < query.shape[2] < key.shape[2] and is_causal(module, kwargs):
            attention_mask = last_rows(query, key)
    output: tuple[Tensor, Tensor | None]
    bias = owner.logit_bias(key.shape[2]) if owner is not None and owner.reads else None
    if bias is not None:
        attention_mask = per_query_head(attention_mask, query)
        attention_mask = biased(attention_mask, bias, query, key, is_causal(module, kwargs))
    kwargs["dropout"] = dropout
    beside = owner.extra_attention(queries, value) if owner is not None and owner.reads else None
    if beside is not None:
        output = _joined(queries, Part(key, value, as_bias(attention_mask, key)), beside, dropout), None
    elif softcap is None and s_aux is None and query.shape[2] == 1 and attention_mask is not None:
        output = _single(queries, value, attention_mask, dropout), None
    elif softcap is None and s_aux is None and seen is not None and _differs(attention_mask, key):
        output = _by_kv_head(queries, value, attention_mask, dropout), None
    elif softcap is None and s_aux is None:
        attention_mask = per_query_head(attention_mask, query)
        output = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    else:
        attention_mask = per_query_head(attention_mask, query)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        mask = additive(attention_mask, query, key, is_causal(module, kwargs))
        output = eager(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs)
    if owner is not None:
        owner.attended(queries)
    return output


def _single(queries: Queries, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """sdpa of one query per row, `[batch, 1, query_heads, dim]`.

    Query heads that share a KV head are its queries: where there is a mask, compiled code would otherwise copy keys and
    values for each of them.
    """
    query, key = queries.query, queries.key
    sets, tokens = key.shape[1:3]
    mask = mask[..., :tokens]  # what hands over masks of all slots may hand over keys of some
    if mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], sets, -1, tokens)
    packed = query.reshape(query.shape[0], sets, -1, query.shape[-1])
    output = scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, dropout_p=dropout, scale=queries.logits.scaling
    )
    return output.reshape(output.shape[0], 1, query.shape[1], -1)


def _differs(mask: Tensor | None, key: Tensor) -> TypeGuard[Tensor]:
    """Whether KV heads have masks of their own, on a device where a loop over them costs less than a copy."""
    return mask is not None and 1 < mask.shape[1] == key.shape[1] and key.device.type == "cpu"


def _by_kv_head(queries: Queries, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """sdpa with a mask `[batch, kv_heads, q, tokens]`, one KV head after the other: `[batch, q, query_heads, dim]`.

    sdpa would turn the masks of all heads into floats at once, and keys and values would be copied for each query head:
    for a chunk of a long prompt that is more memory than what all layers hold.
    """
    query, key = queries.query, queries.key
    outputs = []
    for head, of_group in enumerate(query.split(query.shape[1] // key.shape[1], dim=1)):
        keys, values = (states[:, head : head + 1].expand(-1, of_group.shape[1], -1, -1) for states in (key, value))
        seen, scale = mask[:, head : head + 1], queries.logits.scaling
        attended = scaled_dot_product_attention(of_group, keys, values, attn_mask=seen, dropout_p=dropout, scale=scale)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=2)


@without_autocast
def _read_in_place(
    module: torch.nn.Module,
    reader: Reader | None,
    owner: KeyOwner | None,
    queries: Queries,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    key = queries.key
    if reader is None or (owner is not None and not owner.kv_unchanged):
        raise ValueError(
            f"{type(module).__name__} copies or changes keys or values that the cache returned, which it did not do "
            "with the prompt, and what they carried is lost. Use allocator='uniform', one number as budget, and "
            "bits=None in a static cache."
        )
    if dropout:
        raise ValueError("Attention to codes, or to heads of different length, has no dropout: call model.eval().")
    if owner is not None:
        if owner.masks_itself:  # the reader knows what is visible
            key.seen_by_queries = _Seen(None)  # type: ignore[attr-defined]
        else:
            mask = fitting(mask, owner, queries.query, key)
    if hasattr(key, "seen_by_queries"):
        check_own_mask(mask)
        mask = None
    output = reader(queries.query, mask, queries.logits)
    if owner is not None:
        owner.attended(queries)
    return output.to(queries.query.dtype)


@without_autocast
def _joined(queries: Queries, here: Part, beside: Iterable[Part | Read], dropout: float) -> Tensor:
    """Attention to what the cache returned and to what lies beside it, `[batch, q, query_heads, dim]`."""
    if dropout:
        raise ValueError("Attention that is read from several places has no dropout: call model.eval().")
    query, logits = queries.query, queries.logits
    reads = (part if isinstance(part, Read) else read(query, part, logits) for part in chain([here], beside))
    return join(reads, logits).to(query.dtype).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Seen:
    """What may be seen of keys that a layer handed out; noted on them, since layers may share them.

    Attributes:
        mask: `[batch, 1 or kv_heads, q, tokens]`, or None where every query sees all.
    """

    mask: Tensor | None


def check_understood(module: torch.nn.Module, kwargs: dict[str, Any], name: str = PAGED_EVICTION) -> None:
    """Look at the arguments that a model passes and the attention implementation `name` does not read. Warns once of
    each that is not known.

    Raises:
        ValueError: one of them changes what attention says, by its name, or because it holds numbers that are not
            whole, as a bias and keys do.
    """
    for argument, value in kwargs.items():
        if argument in HARMLESS or value is None or argument.startswith(_OF_OUTPUTS):
            continue
        changes = _names_a_change(argument)
        if changes and isinstance(value, int | float) and not value:
            continue  # no bound, no share
        if changes or _has_numbers(value):
            raise ValueError(
                f"{type(module).__name__} hands {argument}= to attention, which {name!r} does not understand: leaving "
                "it out would give wrong results. Use the attention implementation 'sdpa' or 'eager' with this model, "
                "a policy that needs no queries, and allocator='uniform'."
            )
        if not torch.compiler.is_compiling():
            _warn_of_unknown(type(module).__name__, argument, name)


def _names_a_change(argument: str) -> bool:
    return any(part in argument for part in _CHANGING) or not _CHANGING_WORDS.isdisjoint(argument.split("_"))


def _has_numbers(value: Any) -> bool:
    """Whether these are tensors of numbers that are not whole."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


@cache
def _warn_of_unknown(module: str, argument: str, name: str) -> None:
    warnings.warn(
        f"{module} hands {argument}= to attention, which {name!r} does not know and leaves out. If this argument "
        "changes what attention says, results are wrong: compare with attn_implementation='sdpa', or run "
        "verify(model).",
        stacklevel=4,
    )


def _build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    _handover.waiting = None  # a forward begins: nobody will attend to what a failed one left behind
    return marked_mask(*args, **kwargs)


AttentionInterface.register(PAGED_EVICTION, paged_eviction_attention)
AttentionMaskInterface.register(PAGED_EVICTION, _build_mask)
