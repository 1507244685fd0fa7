"""Attention on codes by code made for it, if it can run: on CUDA three Triton kernels (`kernels`), on a CPU a function
in C (`native`)."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..store.exact import Exact
from ..tensors.parts import tensors_of
from . import native
from .codec import Codec
from .in_codes import InCodes
from .launching import SCHEMA, WARPS, Arguments, launch, output_of

#: The oldest release that compiles the kernels.
_TRITON = (3, 6)
#: Called with less work than operators of `torch.library.custom_op`.
_LIBRARY = torch.library.Library("hf_paged_eviction", "FRAGMENT")
_COLUMNS = "key_codes", "key_levels", "value_codes", "value_levels", "positions"


def attend(held: InCodes, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
    """Attention of one query per row to codes, by the kernels or in C where they can read them; see `InCodes.read`.

    Args:
        mask: see `InCodes.read`; None = all are visible, or those that `InCodes.visible` names.
    """
    mask = _mask_of(held, query) if mask is None else mask
    return (read if obstacle(held, query) is None else InCodes.read)(held, query, mask, logits)


def _mask_of(held: InCodes, query: Tensor) -> Tensor | None:
    """`[batch, query_heads, 1, slots]` bool, a copy of what `InCodes.visible` names; None = all are visible."""
    visible = held.visible
    return None if visible is None else visible.repeat_interleave(query.shape[1] // visible.shape[1], 1)[:, :, None]


class CodesReader:
    """`attend` to these codes, whose call in C is prepared once, while tensors stay where they are; a `Reader`. What is
    written to `InCodes.visible` counts.

    Args:
        held: the codes.
    """

    def __init__(self, held: InCodes) -> None:
        self._held = held
        self._sinks: Tensor | None = None
        self._prepared: native.Prepared | None = None
        self._kind: tuple[object, ...] | None = None
        columns, bounds = held.columns.tensors, held.columns.layout.bounds or ()
        parts = *[columns[name] for name in _COLUMNS], *tensors_of(held.exact), *bounds
        self._may = all([part.is_cpu and part.is_contiguous() for part in parts])
        self._mask: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CodesReader, (self._held,)

    def __call__(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        held = self._held
        if mask is None and self._may and not query.requires_grad:
            kind = query.shape, query.dtype, logits.scaling, logits.softcap
            if kind != self._kind or logits.sinks is not self._sinks:
                self._prepare(query, logits)
                self._kind, self._sinks = kind, logits.sinks
            if self._prepared is not None:
                if self._mask is not None and held.visible is not None:
                    self._mask.unflatten(1, (held.visible.shape[1], -1)).copy_(held.visible[:, :, None, None])
                return self._prepared(query)
        return attend(held, query, mask, logits)

    def hold(self, held: int) -> None:
        """So many slots are in use from now on, the first ones."""
        self._held.held = held
        if self._prepared is not None:
            self._prepared.hold(held)

    def _prepare(self, query: Tensor, logits: Logits) -> None:
        contiguous = logits.sinks is None or logits.sinks.is_contiguous()
        can = contiguous and obstacle(self._held, query) is None
        self._mask = None if self._held.visible is None else _mask_of(self._held, query)
        self._prepared = native.Prepared(_arguments_of(self._held, query, self._mask, logits)) if can else None


def prepare(device: torch.device) -> None:
    """Register the operator that compiled steps call, if they can run it on this device. Graphs cannot do so."""
    if device.type == "cpu" or (device.type == "cuda" and available(device)):
        register()


@cache
def register() -> None:
    """Make `torch.ops.hf_paged_eviction.attend_to_codes`, which compiled code calls: the kernels, and on a CPU the
    function in C."""
    _LIBRARY.define(f"attend_to_codes{SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl("attend_to_codes", lambda *arguments: native.launch(*arguments), "CPU")
    _LIBRARY.impl("attend_to_codes", launch, "CUDA")
    torch.library.register_fake(
        "hf_paged_eviction::attend_to_codes",
        lambda query, mask, sinks, columns, exact, *_: output_of(query, exact),
        lib=_LIBRARY,
    )


def available(device: torch.device) -> bool:
    """Whether eager steps on this device need no torch operators for codes that have no `obstacle`."""
    return _missing(device) is None


def obstacle(held: InCodes, query: Tensor) -> str | None:
    """Why neither the kernels nor the function in C can read these codes, so that torch operators have to; None = they
    can."""
    on_cpu = query.device.type == "cpu"
    if (reason := _missing(query.device)) is not None:
        return reason
    if query.dtype == torch.float64:
        return "the kernels compute in float32"
    if query.requires_grad and torch.is_grad_enabled():
        return "the kernels have no gradient"
    if {*map(type, held.codecs)} != {Codec}:
        return "codes are of another package"
    if max(query.shape[-1], held.dim) > max(WARPS):
        return f"the kernels read heads of at most {max(WARPS)} channels"
    if on_cpu and None in [codec.bits for codec in held.codecs]:
        return "keys or values are not in few bits"
    return None


def _missing(device: torch.device) -> str | None:
    reason: str | None = _missing_on(device)
    return reason


@cache
def _missing_on(device: torch.device) -> str | None:
    if device.type == "cpu":
        return native.missing()
    if device.type != "cuda" or torch.version.hip is not None:
        return "the kernels need CUDA"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a device of compute capability 8.0 or later"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    import triton

    return None if tuple(map(int, triton.__version__.split(".")[:2])) >= _TRITON else "triton is older than 3.6"


torch.compiler.assume_constant_result(_missing)


def read(held: InCodes, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
    """See `InCodes.read`; the result has the dtype of the queries."""
    arguments = _arguments_of(held, query, mask, logits)
    if torch.compiler.is_compiling():
        return torch.ops.hf_paged_eviction.attend_to_codes(*arguments[:-1])  # type: ignore[no-any-return]
    return (native.launch if query.device.type == "cpu" else launch)(*arguments)


def _arguments_of(held: InCodes, query: Tensor, mask: Tensor | None, logits: Logits) -> Arguments:
    columns, bounds = held.columns, held.columns.layout.bounds or (None, None)
    parts = [columns.tensors[name].contiguous() for name in _COLUMNS]
    room = columns.shape[2]
    sizes = room if held.held is None else held.slots, room
    return _arguments(held.codecs, parts, held.exact, bounds, query, mask, logits, sizes)


def read_records(
    codecs: tuple[Codec, Codec],
    columns: dict[str, Tensor],
    exact: Exact,
    records: Tensor,
    lengths: Tensor,
    query: Tensor,
    logits: Logits,
) -> Tensor:
    """As `read`, of records in the memory of a CPU, where there is no `obstacle`.

    Args:
        columns: positions `[batch, 1 or kv_heads, slots, 1]`, and memory.
        records: see `Arguments`.
        lengths: `[batch, kv_heads]` int64, number of slots in use, the first ones.
    """
    parts, slots = [columns[name] for name in _COLUMNS], records.shape[2]
    arguments = _arguments(codecs, parts, exact, (None, lengths), query, None, logits, (slots, slots))
    return native.launch(*arguments._replace(records=records))


def _arguments(
    codecs: tuple[Codec, Codec],
    columns: list[Tensor],
    exact: Exact,
    bounds: tuple[Tensor | None, Tensor | None],
    query: Tensor,
    mask: Tensor | None,
    logits: Logits,
    sizes: tuple[int, int],
) -> Arguments:
    """Of a call; `sizes`: slots that are read, and that a row and KV head has."""
    key_codec, value_codec = codecs
    rotary = key_codec.rotary
    turning: list[Tensor | None] = [None] * 3
    layout = [0, 1, 0, 0]
    if rotary is not None:
        turning[:], layout = rotary.of_channels(query.device)
    return Arguments(
        query.contiguous(),
        mask,
        None if logits.sinks is None else logits.sinks.contiguous(),
        columns,
        [part.contiguous() for part in (exact.slots, exact.keys, exact.values, exact.means, exact.sizes)],
        [None if bound is None else bound.contiguous() for bound in bounds],
        [_turn(key_codec, query), _turn(value_codec, exact.values)],
        turning,
        layout,
        [key_codec.bits or 0, value_codec.bits or 0],
        *sizes,
        logits.scaling,
        logits.softcap,
    )


def _turn(codec: Codec, like: Tensor) -> Tensor | None:
    return codec.turn(like.shape[-1], torch.float32, like.device) if codec.turned else None
