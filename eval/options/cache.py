"""What caches are told: options of `PagedEvictionCache`, made of what the library says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import create_model

from hf_paged_eviction.options.cache_options import BLOCK_SIZE, Typed, read_bits, read_size, typed_options
from hf_paged_eviction.table.spans import read_protect

from .base import Numbers, Options, option, readable
from .model import EMBEDDED

#: Every cache of a run gets these as they are: all but those that a run compares, or decides itself.
SHARED = tuple(name for name in typed_options() if name not in ("budget", "policy", "allocator", "static"))


def offered(*names: str) -> Any:
    """Some options of a cache, as options of a command."""
    fields: dict[str, Any] = {name: _field(*of) for name, of in typed_options(*names).items()}
    return create_model("Offered", __config__=Options.model_config, **fields)


def _field(default: Any, typed: Typed) -> tuple[Any, Any]:
    kind = typed.kind if typed.read is None else Annotated[Numbers, readable(typed.read)]
    field = option(default, typed.help, at_least=typed.at_least, metavar=typed.metavar, shown=typed.shown)
    return kind if default is not None else kind | None, field


class CacheOptions(Options, offered(*SHARED)):  # type: ignore[misc]
    """Options that every cache of a run gets as they are; each is an argument of `PagedEvictionCache` by its name."""

    title: ClassVar[str] = "cache"

    @property
    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of `PagedEvictionCache`."""
        from ..embedded import calibration_path

        values = {name: getattr(self, name) for name in SHARED}
        profile = str(calibration_path()) if self.profile == EMBEDDED else self.profile
        return {**values, "bits": read_bits(self.bits), "protect": read_protect(self.protect), "profile": profile}

    @property
    def block(self) -> int:
        """Tokens per block of a budget in tokens or a share of them."""
        return BLOCK_SIZE if self.block_size is None else int(self.block_size)

    @property
    def protected_roles(self) -> tuple[str, ...]:
        """Roles of messages that are never evicted, see `spans_of_roles`."""
        protected = read_protect(self.protect) or ()
        return tuple(word for word in protected if isinstance(word, str))

    if TYPE_CHECKING:  # their names and types stand in the library

        def __getattr__(self, name: str) -> Any: ...


class OneCacheOptions(CacheOptions, offered("budget", "policy")):  # type: ignore[misc]
    """The same for commands that make one kind of cache."""

    @property
    def size(self) -> int | str | None:
        """`budget=` of the cache."""
        return None if self.budget is None else read_size(self.budget)
