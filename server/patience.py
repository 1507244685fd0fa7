"""Close connections whose clients neither read nor write."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: Seconds between two looks at a connection.
LOOK = 8.0
#: Bytes of an answer that a client takes from one look to the next, at least.
_LEAST = 8 * 1024


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, with a timeout: a connection is closed if nothing moves between two checks.

    This happens if a client reads less than a KiB of a waiting answer in a second, or if it begins the header of a
    request and does not finish it.
    """

    transport: Any
    cycle: Any

    def connection_made(self, transport: Any) -> None:
        """Start the checks."""
        super().connection_made(transport)
        # Writing pauses as soon as anything waits for the client, and resumes when nothing does.
        transport.set_write_buffer_limits(high=0)
        self._waiting, self._idle_since = 0, object()
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the checks."""
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Called when the client has read everything."""
        self._waiting = 0
        super().resume_writing()

    def _look(self) -> None:
        before, self._waiting = self._waiting, self.transport.get_write_buffer_size()
        stalled = 0 < before < self._waiting + _LEAST
        idle = not self._waiting and (self.cycle is None or self.cycle.response_complete)
        if stalled or (idle and self._idle_since is self.cycle):
            self.transport.abort()
            return
        self._idle_since = self.cycle if idle else object()
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)
