"""What live requests hold, for Prometheus and for eyes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged_eviction.serving import BatchingStats

#: Name, type and meaning of each number, and where it comes from.
_METRICS: tuple[tuple[str, str, str, Callable[[BatchingStats], int]], ...] = (
    ("live_requests", "gauge", "Requests that own pages.", lambda stats: stats.live),
    ("waiting_requests", "gauge", "Requests that wait for pages.", lambda stats: stats.waiting),
    ("requests_total", "counter", "Requests admitted so far.", lambda stats: stats.admitted),
    ("refused_requests_total", "counter", "Requests turned away so far.", lambda stats: stats.refused),
    ("tokens_held", "gauge", "Tokens held per layer by live requests.", lambda stats: stats.held),
    ("tokens_evicted_total", "counter", "Tokens evicted per layer so far.", lambda stats: stats.evicted),
    ("pages", "gauge", "Pages of the cache.", lambda stats: stats.pages),
    ("pages_in_use", "gauge", "Pages that belong to requests.", lambda stats: stats.pages_in_use),
    ("page_tokens", "gauge", "Tokens per page.", lambda stats: stats.page_size),
    ("steps_total", "counter", "Forwards so far.", lambda stats: stats.steps),
)


def as_text(stats: BatchingStats) -> str:
    """The numbers in the text format of Prometheus."""
    lines = []
    for name, kind, meaning, read in _METRICS:
        full = f"paged_eviction_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {read(stats)}"]
    return "\n".join(lines) + "\n"


def add_metrics(app: Any, stats: Callable[[], BatchingStats]) -> None:
    """Let the server answer `GET /metrics`."""
    from fastapi.responses import PlainTextResponse

    def metrics() -> PlainTextResponse:
        return PlainTextResponse(as_text(stats()), media_type="text/plain; version=0.0.4")

    app.add_api_route("/metrics", metrics, methods=["GET"])
