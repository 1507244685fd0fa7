"""What a request may ask for by itself: `SamplingParams.extra_args`, or `vllm_xargs` over HTTP."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_paged_eviction.internals import BlockBudget, Setup, Spans, read_spans, whole_number

logger = logging.getLogger("vllm.paged_eviction")

PREFIX = "paged_eviction_"
#: Among the extra arguments of a request that has been scheduled: its id, for messages of the workers.
REQUEST_ID = "id for paged_eviction"
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
            whole_number(f"{PREFIX}budget", budget, 2)  # vLLM's HTTP server makes `true` a 1
        return cls(budget, rows[0] if rows else ())

    def refused_by(self, server: Setup) -> Exception | None:
        """Why a server refuses these options; None = it does not."""
        try:
            server.spans_of([*self.protect] or None, self.budget)
        except (TypeError, ValueError) as error:
            return error
        return None

    def within(self, server: BlockBudget, request_id: str | None = None) -> tuple[int, Spans]:
        """Budget and spans of this request, within the sizes of the server.

        What does not fit is brought within the bounds, with a line in the log: only the process that takes in requests
        could refuse them, and vLLM does not show it the settings.

        Args:
            request_id: its id, for that line; None = no line.
        """
        spans, size = self.protect, server.block_size
        smallest = replace(server, spans=(spans,) if spans else ()).smallest
        if smallest > server.capacity:
            spans, smallest = (), server.smallest
        wanted = server.capacity if self.budget is None else self.budget
        budget = min(max(wanted // size * size, smallest), server.capacity)
        if request_id is not None and (budget, spans) != (wanted, self.protect):
            logger.warning(
                "Request %s: a budget of %d, protecting %s, does not fit. It gets %d, protecting %s.",
                *(request_id, wanted, list(self.protect), budget, list(spans)),
            )
        return budget, spans
