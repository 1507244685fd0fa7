"""What a request may ask for by itself: `SamplingParams.extra_args`, or `vllm_xargs` over HTTP."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_paged_eviction.internals import BlockBudget, Spans, read_spans, whole_number

logger = logging.getLogger("vllm.paged_eviction")

PREFIX = "paged_eviction_"
_NAMES = ("budget", "protect")


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        budget: number of tokens held per layer; None = that of the server.
        protect: spans of its text that are never evicted.
    """

    budget: int | None = None
    protect: Spans = ()

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> "RequestOptions":
        """Read `paged_eviction_budget` and `paged_eviction_protect`; other names are not ours.

        Args:
            extra_args: `protect` is a list of pairs `[[0, 64], [100, 120]]`, or the same numbers in one flat list,
                because HTTP requests cannot nest lists.

        Raises:
            TypeError, ValueError: a name or a value is not valid.
        """
        own = {
            name.removeprefix(PREFIX): value for name, value in (extra_args or {}).items() if name.startswith(PREFIX)
        }
        unknown = sorted(set(own) - set(_NAMES))
        if unknown:
            raise ValueError(
                f"{PREFIX}{unknown[0]} is no option of a request. Known: {', '.join(PREFIX + name for name in _NAMES)}."
            )
        budget, protect = own.get("budget"), own.get("protect")
        if isinstance(protect, list | tuple) and all(type(bound) is int for bound in protect):
            if len(protect) % 2:
                raise ValueError(
                    f"{PREFIX}protect={protect!r} is a flat list of begins and ends, so their number is even."
                )
            protect = list(zip(protect[::2], protect[1::2], strict=True))
        rows = read_spans(protect)
        if len(rows) > 1:
            raise TypeError(f"{PREFIX}protect has spans for {len(rows)} rows; a request is one: give pairs.")
        if budget is not None:
            whole_number(f"{PREFIX}budget", budget, 1)
        return cls(budget, rows[0] if rows else ())

    def sizes(self, server: BlockBudget) -> BlockBudget:
        """The sizes of this request, within those of the server.

        What does not fit is refused where the server's sizes are known before the request is admitted (see `frontend`).
        Elsewhere it is brought within the bounds, with a line in the log: nobody but the request itself may suffer.
        """
        try:
            return self.checked(server)
        except ValueError as error:
            logger.warning("%s Served with the nearest sizes that fit.", error)
        spanned = replace(server, spans=(self.protect,) if self.protect else ())
        if spanned.smallest > server.capacity:
            spanned = server
        wanted = server.capacity if self.budget is None else self.budget // server.block_size * server.block_size
        return spanned.of(min(max(wanted, spanned.smallest), server.capacity))

    def checked(self, server: BlockBudget) -> BlockBudget:
        """The sizes of this request.

        Raises:
            ValueError: they do not fit together, or exceed those of the server; the message says what would fit.
        """
        if self.budget is not None and self.budget > server.capacity:
            raise ValueError(
                f"{PREFIX}budget={self.budget} is more than {server.capacity}, the budget of this server. Ask for at "
                f"most {server.capacity} tokens, or leave it out."
            )
        sizes = server if self.budget is None else server.of(self.budget)
        return sizes.protecting([*self.protect]) if self.protect or self.budget is not None else sizes
