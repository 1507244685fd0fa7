"""The arguments of `PagedEvictionCache`: its options, and what is no option. Names of before work until 0.2."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from ..naming.sizes import parse_bytes, share_text
from ..precision.base import PRECISIONS
from ..table.budget import whole_number
from .cache_options import CacheOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ..store.pool import StoragePool

P = ParamSpec("P")
A = TypeVar("A")
S = TypeVar("S")


@dataclass(frozen=True)
class CacheArguments(CacheOptions):
    """What `PagedEvictionCache` is told besides the configuration; see there."""

    attention_mask: "Tensor | None" = field(default=None, kw_only=True)
    pool: "StoragePool | None" = field(default=None, kw_only=True)
    _prefix: int = field(default=0, kw_only=True)
    _record_past: bool = field(default=False, kw_only=True)
    _inside_encoder_decoder: bool = field(default=False, kw_only=True)


def takes(
    arguments: Callable[P, A],
) -> Callable[[Callable[[S, Any, A], None]], Callable[Concatenate[S, Any, P], None]]:
    """Let a constructor of two arguments, a configuration and the object of a dataclass, take the fields of the
    dataclass one by one, those of before among them."""
    signature = inspect.signature(arguments)
    shown = [each for each in signature.parameters.values() if not each.name.startswith("_")]

    def decorate(method: Callable[[S, Any, A], None]) -> Callable[Concatenate[S, Any, P], None]:
        @wraps(method)
        def constructor(self: S, config: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            made: Any = arguments
            method(self, config, made(**renamed(signature, args, kwargs, type(self).__name__)))

        first = list(inspect.signature(method).parameters.values())[:2]
        constructor.__signature__ = inspect.Signature([*first, *shown])  # type: ignore[attr-defined]
        return cast(Callable[Concatenate[S, Any, P], None], constructor)

    return decorate


def renamed(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], who: str, stacklevel: int = 3
) -> dict[str, Any]:
    """Arguments by name, with the new ones in place of the old.

    Args:
        who: takes them, for messages.
        stacklevel: of warnings: 2 = the caller's.

    Raises:
        TypeError: there is no such argument, or one is given twice. Of old names also ValueError: as before.
    """
    old = {name: kwargs[name] for name in _OLD if name in kwargs}
    new = {name: value for name, value in kwargs.items() if name not in old}
    try:
        given = dict(signature.bind(*args, **new).arguments)
    except TypeError as error:
        raise TypeError(f"{who}: {error}") from None
    for name in tuple(old):
        instead, replace = _OLD[name]
        warnings.warn(f"{name}= goes in 0.2: write {instead}.", DeprecationWarning, stacklevel=stacklevel)
        replace(given, old)
    return given


def _budget(given: dict[str, Any], name: str, text: str) -> None:
    if given.get("budget") is not None:
        raise ValueError(f"budget= and {name}= both say how much is held: give budget= alone.")
    given["budget"] = text


def _keep_ratio(given: dict[str, Any], old: dict[str, Any]) -> None:
    ratio = old["keep_ratio"]
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise TypeError(f"keep_ratio must be a number, got {ratio!r}.")
    if not 0 < float(ratio) <= 1:
        raise ValueError(f"keep_ratio must lie in (0, 1], got {ratio}.")
    _budget(given, "keep_ratio", share_text(float(ratio)))


def _memory(given: dict[str, Any], old: dict[str, Any]) -> None:
    if old["memory"] is not None:
        _budget(given, "memory", f"{parse_bytes(old['memory'])}B")


def _protected_prefix(given: dict[str, Any], old: dict[str, Any]) -> None:
    given["_prefix"] = whole_number("protected_prefix", old["protected_prefix"], 0)


def _rank(given: dict[str, Any], old: dict[str, Any]) -> None:
    rank, basis = old.pop("rank", None), old.pop("basis", None)  # at once, whichever comes first
    if rank is None and basis is None:
        return
    if basis is None:
        raise ValueError(
            f"rank={rank!r} needs basis=, a file of the model's directions: `paged-eviction fit-basis` writes one."
        )
    if rank is None:
        raise ValueError("basis= says how to keep tokens, and rank= how much of them: give rank= too.")
    low_rank: Any = PRECISIONS.named("low_rank")
    given["bits"] = low_rank(basis, rank, given.get("bits"))


def _record_past(given: dict[str, Any], old: dict[str, Any]) -> None:
    given["_record_past"] = old["record_past"]


#: By old name: what to write instead, and what does that.
_OLD: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Any]], None]]] = {
    "keep_ratio": ("a share as budget, such as budget='25%'", _keep_ratio),
    "memory": ("bytes as budget, such as budget='2GiB'", _memory),
    "protected_prefix": ("sink_tokens=, the larger of the two numbers", _protected_prefix),
    "rank": ("bits='low_rank:FILE(rank=64)'", _rank),
    "basis": ("bits='low_rank:FILE(rank=64)'", _rank),
    "record_past": ("cache.activate_past_recording() once the cache is made", _record_past),
}
OLD_NAMES = frozenset(_OLD)
