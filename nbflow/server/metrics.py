"""Prometheus metrics under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LABELS = ("model_name",)

Stats = Mapping[str, float]
"""Statistics of an engine, by the names in `GAUGES` and `COUNTERS`."""

GAUGES = {
    "num_requests_running": "Running sequences.",
    "num_requests_waiting": "Waiting sequences.",
    "kv_cache_usage_perc": "Share of KV cache pages in use, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Preempted sequences.",
    "spec_decode_num_draft_tokens": "Draft tokens of finished sequences.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens of finished sequences.",
    "iteration_steps": "Engine steps.",
    "iteration_seconds": "Seconds spent in engine steps.",
}


class Metrics:
    """Registry of counters, gauges and histograms.

    `engines` returns the `Stats` of every model, and is called at each scrape.
    """

    def __init__(self, engines: Callable[[], dict[str, Stats]]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Engines(engines))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.finished = self._counter(
            "request_success", "Finished sequences by reason.", "finished_reason"
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "From a token to the next.", _SHORT
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _SECONDS
        )
        self.queued = self._histogram(
            "request_queue_time_seconds", "From the request to its first step.", _SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _SECONDS
        )
        self.http = Counter(
            "nbflow:http_requests",
            "HTTP requests by path and status.",
            ("path", "status"),
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*_LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets)

    def text(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Collector that reads the engines' statistics at each scrape."""

    def __init__(self, engines: Callable[[], dict[str, Stats]]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Metric]:
        return []  # registration would otherwise collect

    def collect(self) -> Iterable[Metric]:
        stats = self._engines()
        for kind, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text in names.items():
                family: Any = kind(f"vllm:{name}", text, labels=_LABELS)
                for model, numbers in stats.items():
                    family.add_metric([model], numbers[name])
                yield family


class Clock:
    """Latencies of one sequence."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._between = metrics.between.labels(model)
        self._started = time.monotonic()
        self._first = self._last = 0.0

    def tokens(self, n: int) -> None:
        """Record the arrival of `n` tokens."""
        now, metrics = time.monotonic(), self._metrics
        if not self._first:
            self._first = self._last = now
            metrics.first_token.labels(self._model).observe(now - self._started)
            n -= 1
        for _ in range(n):
            self._between.observe((now - self._last) / n)
        self._last = now

    def end(self, reason: str, n_prompt: int, n_new: int, queued_s: float | None) -> None:
        """Record the end of the sequence."""
        now, metrics, model = time.monotonic(), self._metrics, self._model
        metrics.finished.labels(model, reason).inc()
        metrics.prompt_tokens.labels(model).inc(n_prompt)
        metrics.generation_tokens.labels(model).inc(n_new)
        metrics.whole.labels(model).observe(now - self._started)
        if self._first:
            metrics.decode.labels(model).observe(self._last - self._first)
            if queued_s is not None:
                metrics.queued.labels(model).observe(queued_s)
                metrics.prefill.labels(model).observe(
                    max(0.0, self._first - self._started - queued_s)
                )
