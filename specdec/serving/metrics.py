"""What a server counts, in Prometheus' form. Nothing that a client writes becomes a label."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.engine.engine import Engine
from specdec.engine.requests import RequestResult

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SECONDS_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The metrics of one server; `text` is what `/metrics` answers.

    Args:
        engine: whose state they tell.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.answers = Counter(
            "specdec_http_requests", "Requests by endpoint and status.", ("endpoint", "status"), registry=self._registry
        )
        self._first = Histogram(
            "specdec_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "specdec_time_per_token_seconds",
            "Mean time of the tokens behind the first one, by request.",
            buckets=_SECONDS_PER_TOKEN,
            registry=self._registry,
        )
        self._queue = Histogram(
            "specdec_queue_seconds", "From the request to its prompt's turn.", buckets=_SECONDS, registry=self._registry
        )

    def observe(self, result: RequestResult) -> None:
        """Count a request that has ended."""
        if result.first_token_ms == result.first_token_ms:
            self._first.observe(result.first_token_ms / 1e3)
            self._queue.observe(result.queue_ms / 1e3)
        if len(result.tokens) > 1:
            behind = result.total_ms - result.first_token_ms
            self._per_token.observe(behind / 1e3 / (len(result.tokens) - 1))

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)


class _EngineCollector:
    """What an engine tells of itself when it is asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """As prometheus_client asks."""
        stats = self._engine.stats()
        gauges = {
            "specdec_requests_running": ("Requests in rows, or whose prompts are read.", stats.num_running),
            "specdec_requests_waiting": ("Requests in the queue.", stats.num_waiting),
            "specdec_rows": ("Rows of the memory that runs.", stats.num_rows),
            "specdec_acceptance_length": ("Tokens per step and row, of the last requests.", stats.tau),
            "specdec_nodes_per_step": ("Nodes that the target scores per row and step.", stats.mean_nodes),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        by_depth = GaugeMetricFamily(
            "specdec_acceptance_at_depth", "Draft tokens accepted behind accepted ones, by depth.", labels=("depth",)
        )
        for depth, share in enumerate(stats.acceptance_at_depth, start=1):
            by_depth.add_metric((str(depth),), share)
        yield by_depth
        counters = {
            "specdec_prompt_tokens": ("Tokens of prompts that were read.", stats.num_prompt_tokens),
            "specdec_generated_tokens": ("Tokens that were emitted.", stats.num_new_tokens),
            "specdec_steps": ("Steps, each of all rows.", stats.num_steps),
        }
        for name, (about, count) in counters.items():
            yield CounterMetricFamily(name, about, value=count)
        ended = CounterMetricFamily("specdec_requests", "Requests that have ended, by reason.", labels=("reason",))
        for reason, count in sorted(stats.num_finished.items()):
            ended.add_metric((reason,), count)
        yield ended
