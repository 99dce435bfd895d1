"""A store becomes a model that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.serve.batch.opening import open_runner
from tierstore.serve.config import ServeConfig
from tierstore.serve.opening import ServedParts, open_served
from tierstore.serve.scheduler.interface import Counts, Running
from tierstore.serve.text.language import open_language
from tierstore.timeline import open_timeline
from tierstore.units import format_bytes


@contextmanager
def open_running(
    config: ServeConfig, *, trace: Path | None = None, timeline: Path | None = None
) -> Iterator[Running]:
    """The model in ``config.store``. ``trace`` records its cache's decisions, ``timeline`` what it waits for. Raises what
    ``open_served`` does.
    """
    with open_timeline(timeline) as sink, open_served(config, trace=trace, timeline=sink) as parts:
        runner, language = open_runner(parts), open_language(parts.spec)
        yield Running(
            runner=runner,
            language=language,
            context=runner.model.context,
            counts=lambda: _counts(parts),
            lines=(*_lines(parts), *language.lines),
        )
        parts.store.end_trace()


def _counts(parts: ServedParts) -> Counts:
    residency = parts.store.cache.residency
    stats = residency.stats()
    return Counts(
        hits=stats.hits,
        misses=stats.misses,
        moved_bytes={
            "nvme read": stats.read_bytes,
            "nvme read early": stats.prefetch_read_bytes,
            "nvme read in vain": stats.wasted_prefetch_bytes,
        },
        stall_s={
            cause.value: spent_ns / 1e9
            for cause, spent_ns in parts.ledger.totals(lambda key: key.cause).items()
        },
        pinned=sum(residency.state(int(entry)).pins > 0 for entry in residency.resident_entries()),
    )


def _lines(parts: ServedParts) -> tuple[str, ...]:
    config, spec = parts.config, parts.spec
    batch = "batch-invariant" if config.batch.invariant else "padded"
    device = "as the host budget allows" if not config.device_budget else format_bytes(config.device_budget)
    return (
        f"model: {len(spec.moe_layers)} layers of {spec.experts} experts, {spec.compute_dtype.value}, on {parts.device}",
        f"budget: {format_bytes(config.host_budget)} for experts on the host, on the device {device}; a batch of at "
        f"most {config.batch.sequences} sequences, {batch}",
        f"cache policy: {config.cache.summary}; guesses: {config.prefetch.predictor.value}",
        *parts.store.describe(),
    )
