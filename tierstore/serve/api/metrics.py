"""The Prometheus metrics of /metrics, in the server's own registry."""

from __future__ import annotations

import os
from collections.abc import Iterator

import prometheus_client as prometheus
import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.serve.admission import RequestOutcome
from tierstore.serve.engine import ServingEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """Counts what happens in an engine, for Prometheus."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"tierstore_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> prometheus.Histogram:
            return prometheus.Histogram(f"tierstore_{name}", text, registry=self.registry, buckets=buckets)

        self._ended = counter("requests", "Accepted requests that have ended, by outcome.", "outcome")
        self._refused = counter("refused", "Refused requests, by HTTP status.", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens computed.")
        self._generated = counter("generated_tokens", "Answer tokens generated.")
        self._first = histogram("time_to_first_token_seconds", "From accepting a request to its first token.")
        self._between = histogram("inter_token_seconds", "Time between two tokens of an answer.")
        self._prefill = histogram("prefill_seconds", "Time of a prefill.")
        self._step = histogram("step_seconds", "Time of a decode step.")
        self._batch = histogram("batch_size", "Sequences in a decode step.", _SIZES)
        self._split_up = counter(
            "split_passes", "Passes of several sequences that failed and were repeated one by one."
        )
        for outcome in RequestOutcome:
            self._ended.labels(outcome.value)

    def show(self, engine: ServingEngine) -> None:
        """Add metrics for the state of ``engine`` and of this process."""
        self.registry.register(_State(engine))

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return prometheus.generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error before it was accepted. The event loop calls it."""
        self._refused.labels(str(status)).inc()

    @property
    def totals(self) -> dict[str, object]:
        """Totals of all requests, for the end of a run."""

        def total(name: str, **labels: str) -> int:
            return int(self.registry.get_sample_value(f"tierstore_{name}_total", labels) or 0)

        outcomes = [outcome.value for outcome in RequestOutcome]
        return {
            "prompt_tokens_count": total("prompt_tokens"),
            "generated_tokens_count": total("generated_tokens"),
            **{f"{outcome}_requests_count": total("requests", outcome=outcome) for outcome in outcomes},
        }

    # The engine calls the methods below, mostly on the model's thread; prometheus_client locks its counters.

    def joined(self, *, tokens: int, seconds: float) -> None:
        """A prefill of prompts with ``tokens`` tokens in all took ``seconds``."""
        self._prompt.inc(tokens)
        self._prefill.observe(seconds)

    def stepped(self, *, sequences: int, seconds: float) -> None:
        """A decode step, one token for each of ``sequences`` sequences, took ``seconds``."""
        self._step.observe(seconds)
        self._batch.observe(sequences)

    def split_up(self) -> None:
        """A pass of several sequences failed, and each is computed again alone."""
        self._split_up.inc()

    def token(self, *, first: bool, seconds: float) -> None:
        """A token of an answer was chosen, ``seconds`` after its request was made (if ``first``) or after the last token."""
        (self._first if first else self._between).observe(seconds)
        self._generated.inc()

    def ended(self, outcome: RequestOutcome) -> None:
        """A request has ended. Also called by the event loop."""
        self._ended.labels(outcome.value).inc()


class _State:
    """Values that are read when the metrics are collected."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
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
            ("expert_misses", "Experts that were not in memory when they were needed.", counts.misses),
            ("mapped_experts", "Experts computed with in mapped files.", counts.mapped),
            ("mapped_bytes", "Bytes of experts computed with in mapped files.", counts.mapped_bytes),
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
