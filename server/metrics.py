"""What operators watch, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hf_paged_eviction.serving import BatchingStats

_PREFIX = "paged_eviction_"
#: Seconds, from a token on a fast device to a prompt on a slow one.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKENS = tuple(2**power for power in range(0, 19, 2))

_GAUGES: tuple[tuple[str, str, Callable[[BatchingStats], int]], ...] = (
    ("live_requests", "Requests that own pages.", lambda stats: stats.live),
    ("waiting_requests", "Requests that wait for pages.", lambda stats: stats.waiting),
    ("tokens_held", "Tokens held per layer by live requests.", lambda stats: stats.held),
    ("pages", "Pages of the cache.", lambda stats: stats.pages),
    ("pages_in_use", "Pages that belong to requests.", lambda stats: stats.pages_in_use),
    ("kept_bytes", "Bytes of prompts that may come again.", lambda stats: stats.kept_bytes),
    ("page_tokens", "Tokens per page.", lambda stats: stats.page_size),
)
_COUNTERS: tuple[tuple[str, str, Callable[[BatchingStats], int]], ...] = (
    ("admitted_requests", "Requests that were given pages.", lambda stats: stats.admitted),
    ("tokens_shared", "Tokens of prompts that earlier requests had read.", lambda stats: stats.shared),
    ("tokens_evicted", "Tokens evicted per layer.", lambda stats: stats.evicted),
    ("steps", "Forwards.", lambda stats: stats.steps),
)


class Meter:
    """All numbers of one server.

    Args:
        stats: of the requests that are live now.
    """

    def __init__(self, stats: Callable[[], BatchingStats]) -> None:
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _SECONDS
        )
        self.token = self._histogram("time_per_output_token_seconds", "From one token to the next.", _SECONDS)
        self.answer = self._histogram("request_seconds", "From a request to the end of its answer.", _SECONDS)
        self.prompt_tokens = self._histogram("prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_tokens = self._histogram("answer_tokens", "Tokens of an answer.", _TOKENS)
        self.ended = Counter(
            f"{_PREFIX}answers",
            "Answers by their end: stop, length, cancelled, failed.",
            ["end"],
            registry=self._registry,
        )
        self._refused = Counter(
            f"{_PREFIX}refused_requests",
            "Requests turned away, by status of HTTP.",
            ["status"],
            registry=self._registry,
        )

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, meaning, buckets=buckets, registry=self._registry)

    def refuse(self, status: int) -> None:
        """A request was turned away."""
        self._refused.labels(status).inc()

    def collect(self) -> Iterator[Metric]:
        """What is read from the batching whenever somebody asks."""
        stats = self._stats()
        for name, meaning, read in _GAUGES:
            yield GaugeMetricFamily(_PREFIX + name, meaning, value=read(stats))
        for name, meaning, read in _COUNTERS:
            yield CounterMetricFamily(_PREFIX + name, meaning, value=read(stats))

    def as_text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self._registry)
