"""The metrics of /metrics, in a registry of the server's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import prometheus_client as prometheus
import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.serve.admission import RequestOutcome
from tierstore.serve.engine import ServingEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """A Watcher of an engine, and what it has seen as Prometheus reads it."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"tierstore_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> prometheus.Histogram:
            return prometheus.Histogram(f"tierstore_{name}", text, registry=self.registry, buckets=buckets)

        self._ended = counter("requests", "Requests that were accepted and have ended, by how.", "outcome")
        self._refused = counter("refused", "Requests that were refused, by HTTP status.", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were computed.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self._first = histogram("time_to_first_token_seconds", "From accepting a request to its first token.")
        self._between = histogram("inter_token_seconds", "Between two tokens of an answer.")
        self._prefill = histogram("prefill_seconds", "Passes over prompts.")
        self._step = histogram("step_seconds", "Passes that decode.")
        self._batch = histogram("batch_size", "Sequences of a pass that decodes.", _SIZES)
        self._split_up = counter(
            "split_passes", "Passes of several sequences that failed: each was computed on its own."
        )
        for outcome in RequestOutcome:
            self._ended.labels(outcome.value)
        self._tokens = [0, 0]  # of prompts and answers
        self._outcomes = Counter[RequestOutcome]()

    def show(self, engine: ServingEngine) -> None:
        """Show the state of ``engine`` and of this process too."""
        self.registry.register(_State(engine))

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return prometheus.generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """A request was answered with an error before it was accepted. By the event loop."""
        self._refused.labels(str(status)).inc()

    @property
    def totals(self) -> dict[str, object]:
        """Counts of all requests, for the end of a run."""
        return {
            "prompt_tokens_count": self._tokens[0],
            "generated_tokens_count": self._tokens[1],
            **{f"{outcome.value}_requests_count": self._outcomes[outcome] for outcome in RequestOutcome},
        }

    # A Watcher's, on the engine's thread; prometheus_client locks what it counts.

    def joined(self, *, sequences: int, tokens: int, seconds: float) -> None:
        self._prompt.inc(tokens)
        self._prefill.observe(seconds)
        self._tokens[0] += tokens

    def stepped(self, *, sequences: int, seconds: float) -> None:
        self._step.observe(seconds)
        self._batch.observe(sequences)

    def split_up(self) -> None:
        self._split_up.inc()

    def token(self, *, first: bool, seconds: float) -> None:
        (self._first if first else self._between).observe(seconds)
        self._generated.inc()
        self._tokens[1] += 1

    def ended(self, outcome: RequestOutcome) -> None:
        self._ended.labels(outcome.value).inc()
        self._outcomes[outcome] += 1


class _State:
    """Values that are read when the metrics are collected."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """The families."""
        engine, counts = self._engine, self._engine.counts
        for name, text, value in (
            ("queue_requests", "Requests that wait for a place in the batch.", len(engine.queue)),
            ("queue_tokens", "Tokens of waiting requests, prompts and answers.", engine.queue.tokens),
            ("batch_sequences", "Sequences in the batch now.", engine.active),
            ("pinned_experts", "Experts that are leased or pinned now.", counts.pinned),
            ("resident_memory_bytes", "Resident memory of the server.", self._process.memory_info().rss),
            ("open_descriptors", "Open file descriptors of the server.", len(os.listdir("/proc/self/fd"))),
            ("threads", "Threads of the server.", self._process.num_threads()),
        ):
            yield GaugeMetricFamily(f"tierstore_{name}", text, value=value)
        for name, text, value in (
            ("expert_hits", "Experts that were in memory when they were needed.", counts.hits),
            ("expert_misses", "Experts that were not.", counts.misses),
        ):
            yield CounterMetricFamily(f"tierstore_{name}", text, value=value)
        moved = CounterMetricFamily(
            "tierstore_moved_bytes", "Bytes moved, by tier and direction.", labels=["tier"]
        )
        for tier, value in counts.moved_bytes.items():
            moved.add_metric([tier], value)
        yield moved
        stalls = CounterMetricFamily(
            "tierstore_stall_seconds", "Time the model waited, by cause.", labels=["cause"]
        )
        for cause, seconds in counts.stall_s.items():
            stalls.add_metric([cause], seconds)
        yield stalls
