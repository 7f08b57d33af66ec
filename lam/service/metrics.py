"""Metrics for Prometheus, in their own registry."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lam.retrieval.decisions.promise import State
from lam.service.engine import Engine

_WINDOW = 1000
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """Requests, seconds, decisions and κ of an engine; gauges are read when metrics are requested."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._registry = engine, (registry := CollectorRegistry())
        self._kappa: deque[float] = deque(maxlen=_WINDOW)
        self._requests = Counter("lam_requests", "Requests answered.", ("route", "method", "status"), registry=registry)
        what, labels = "Seconds to an answer.", ("route",)
        self._seconds = Histogram("lam_request_seconds", what, labels, buckets=_BUCKETS, registry=registry)
        self._decisions = Counter("lam_decisions", "Decisions on queries.", ("decision",), registry=registry)
        self._pairs = Counter("lam_pair_decisions", "Decisions on pairs.", ("decision",), registry=registry)
        registry.register(self)

    def count_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the template of a path, so there are few series."""
        known = method if method in _METHODS else "other"
        self._requests.labels(route, known, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_decision(self, decision: str | None, kappa: float) -> None:
        """Count a decision, and keep the κ of its query for the quantiles."""
        self._decisions.labels(decision or "none").inc()
        self._kappa.append(kappa)

    def count_pair(self, decision: str | None) -> None:
        """Count a decision on a pair."""
        self._pairs.labels(decision or "none").inc()

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine, kappa = self._engine, torch.tensor(list(self._kappa), dtype=torch.float64)
        yield GaugeMetricFamily("lam_index_items", "Items in the gallery.", len(engine.gallery))
        searchable = float(engine.gallery.complaint is None)
        yield GaugeMetricFamily("lam_index_searchable", "1, or 0 while the index cannot be searched.", searchable)
        waiting = {worker.name: len(worker) for worker in engine.workers}
        yield _gauges("lam_queue_length", "Requests that wait.", "worker", waiting)
        restarts = {worker.name: worker.restarts for worker in engine.workers}
        yield _gauges("lam_worker_restarts", "Threads that died.", "worker", restarts)
        if (promise := engine.watch.state) is not None:
            states = {state: float(state == promise) for state in get_args(State)}
            yield _gauges("lam_promise", "1 for the state of the promises.", "state", states)
            readings = engine.watch.readings
            evidence = {reading.name: reading.evidence for reading in readings}
            yield _gauges("lam_promise_evidence", "Wealth of bets against the promises.", "test", evidence)
            judged = {reading.name: reading.n for reading in readings}
            yield _gauges("lam_promise_observations", "Queries, or judged answers.", "test", judged)
        if len(kappa):
            quantiles = {str(quantile): float(kappa.quantile(quantile)) for quantile in _QUANTILES}
            yield _gauges("lam_query_kappa", f"κ of the last {_WINDOW} queries.", "quantile", quantiles)


def _gauges(name: str, help: str, label: str, values: Mapping[str, float | int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
