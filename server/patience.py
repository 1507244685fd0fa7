"""How long a connection is waited for: one whose client neither reads nor writes is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: Seconds between two looks at a connection.
LOOK = 8.0
#: Bytes of an answer that a client takes from one look to the next, at least.
_LEAST = 8 * 1024


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP as uvicorn speaks it; a connection is closed when nothing moves between two looks at it.

    That is so where a client lets an answer wait and takes less than a KiB of it in a second, or where it has begun
    the lines of a request and does not end them.
    """

    transport: Any
    cycle: Any

    def connection_made(self, transport: Any) -> None:
        """Look at it from now on."""
        super().connection_made(transport)
        # Writing pauses as soon as anything waits for the client, and resumes when nothing does.
        transport.set_write_buffer_limits(high=0)
        self._waiting, self._idle_since = 0, object()
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """The client has taken everything."""
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
