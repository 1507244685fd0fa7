"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .stats import BatchingStats

_NAMESPACE = "paged_eviction"
#: Seconds, from a token on a fast device to a prompt on a slow one.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKENS = tuple(2**power for power in range(0, 19, 2))

#: Metrics that are read from the batching.
_READ: tuple[tuple[type[Metric], str, str, Callable[[BatchingStats], int]], ...] = (
    (GaugeMetricFamily, "live_requests", "Requests that own pages.", lambda stats: stats.live),
    (GaugeMetricFamily, "waiting_requests", "Requests that wait for pages.", lambda stats: stats.waiting),
    (GaugeMetricFamily, "tokens_held", "Tokens held per layer by live requests.", lambda stats: stats.held),
    (GaugeMetricFamily, "pages", "Pages of the cache.", lambda stats: stats.pages),
    (GaugeMetricFamily, "pages_in_use", "Pages that belong to requests.", lambda stats: stats.pages_in_use),
    (GaugeMetricFamily, "kept_bytes", "Bytes of prompts that may come again.", lambda stats: stats.kept_bytes),
    (GaugeMetricFamily, "page_tokens", "Tokens per page.", lambda stats: stats.page_size),
    (CounterMetricFamily, "admitted_requests", "Requests that were given pages.", lambda stats: stats.admitted),
    (CounterMetricFamily, "tokens_shared", "Tokens of prompts read by earlier requests.", lambda stats: stats.shared),
    (CounterMetricFamily, "tokens_evicted", "Tokens evicted per layer.", lambda stats: stats.evicted),
    (CounterMetricFamily, "steps", "Forwards.", lambda stats: stats.steps),
)


class Meter:
    """The metrics of one server.

    Args:
        stats: returns the stats of live requests.
    """

    def __init__(self, stats: Callable[[], BatchingStats]) -> None:
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(self)
        of: dict[str, Any] = {"namespace": _NAMESPACE, "registry": self._registry}
        seconds, tokens = of | {"buckets": _SECONDS}, of | {"buckets": _TOKENS}
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.", **seconds)
        self.token = Histogram("time_per_output_token_seconds", "From one token to the next.", **seconds)
        self.answer = Histogram("request_seconds", "From a request to the end of its answer.", **seconds)
        self.prompt_tokens = Histogram("prompt_tokens", "Tokens of a prompt.", **tokens)
        self.answer_tokens = Histogram("answer_tokens", "Tokens of an answer.", **tokens)
        self.ended = Counter("answers", "Answers by their end: stop, length, cancelled, failed.", ["end"], **of)
        self._refused = Counter("refused_requests", "Requests turned away, by status of HTTP.", ["status"], **of)

    def refuse(self, status: int) -> None:
        """Count a refused request."""
        self._refused.labels(status).inc()

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read from the batching at each scrape."""
        stats = self._stats()
        for kind, name, meaning, read in _READ:
            yield kind(f"{_NAMESPACE}_{name}", meaning, value=read(stats))  # type: ignore[call-arg]

    def as_text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
