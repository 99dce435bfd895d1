"""``tierstore serve``: the HTTP server over a store.

The first SIGTERM or SIGINT drains it, the second ends it at once.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.capabilities import require_package
from tierstore.cli.models import deployed_settings, describe_settings
from tierstore.cli.options import (
    EXISTING_FILE,
    PATH,
    config_options,
    config_overrides,
    dataclass_options,
    help_config_option,
    json_option,
    option,
    output_file,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.outputs import OutputKind
from tierstore.serve.config import ServeConfig
from tierstore.units import format_seconds, printable

if TYPE_CHECKING:
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.engine import ServingEngine


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, whom it answers, and what it writes besides."""

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int = option(8000, help="Port; 0 takes a free one.", type=click.IntRange(0, 65535))
    api_keys: Path | None = option(
        None, help="File of keys, one a line; a request must bear one.", type=EXISTING_FILE
    )
    name: str | None = option(None, help="The model's name in requests (default: the store's directory).")
    record_trace: Path | None = option(
        None, help="Record every cache decision's input.", type=output_file(OutputKind.TRACE)
    )
    timeline: Path | None = option(
        None, help="Write a Chrome trace for Perfetto.", type=output_file(OutputKind.TIMELINE)
    )


@click.command()
@click.argument("store", type=PATH)
@click.option("--config", type=EXISTING_FILE, help="TOML file of configuration keys.")
@dataclass_options(Listening, "listening")
@config_options(
    ServeConfig,
    {
        "--host-budget": "host_budget",
        "--device-budget": "device_budget",
        "--batch-size": "batch.sequences",
        "--context": "batch.context",
        "--batch-invariant": "batch.invariant",
        "--max-queue": "limits.queue",
        "--max-tokens": "limits.tokens",
        "--request-timeout": ("limits.request_s", {"metavar": "SECONDS"}),
    },
)
@set_option()
@json_option
@help_config_option(lambda: ServeConfig)
def serve(
    store: Path,
    config: Path | None,
    listening: Listening,
    given: dict[str, object],
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Answer OpenAI's API from STORE, trained or imported, in the memory you give; with a page to try it at /.

    The store is opened for reading only: several servers may have it open, and none writes to it.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "tierstore serve", extra="serve")
    deployed = {} if config is not None else deployed_settings(store)
    overrides = config_overrides(settings, {"store": store, **given})
    served = load(ServeConfig, config, {**deployed, **overrides})
    if deployed:
        output.line(describe_settings(store, deployed, overrides))
    _run(served, listening, output)


def _run(config: ServeConfig, listening: Listening, output: Output) -> None:
    from tierstore.serve.api.app import Keys, Service, make_app
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.api.server import ApiServer, ServerLog, is_loopback, listen, url
    from tierstore.serve.engine import ServingEngine
    from tierstore.serve.opening import open_running

    keys = Keys() if listening.api_keys is None else Keys.read(listening.api_keys)
    metrics, log, begun_s = ServerMetrics(), ServerLog(), time.monotonic()
    with ExitStack() as stack:
        bound = stack.enter_context(listen(listening.host, listening.port))
        if not is_loopback(bound) and not keys.required:
            warnings.warn(
                f"listening on {listening.host} without authentication, which other machines can reach; set --api-keys",
                stacklevel=1,
            )
        engine = ServingEngine(
            lambda: open_running(config, trace=listening.record_trace, timeline=listening.timeline),
            sequences=config.batch.sequences,
            limits=config.limits,
            watcher=metrics,
            log=log.write,
        )
        stack.enter_context(engine)
        metrics.show(engine)
        name = printable(listening.name or config.store.resolve().name)

        def opened() -> None:
            for line in engine.running.lines:
                output.line(line)
            output.line(f"opened in {format_seconds(time.monotonic() - begun_s)}")
            output.line(f"serving {name} at {url(bound)}")

        service = Service(
            engine=engine, metrics=metrics, limits=config.limits, keys=keys, model=name, log=log
        )
        server = ApiServer(make_app(service), engine, config.limits, opened=opened)
        asyncio.run(server.serve([bound]))
    output.line(f"stopped after {format_seconds(time.monotonic() - begun_s)}")
    output.emit(_totals(engine, metrics, seconds=time.monotonic() - begun_s))


def _totals(engine: ServingEngine, metrics: ServerMetrics, *, seconds: float) -> dict[str, object]:
    from tierstore.train.footprint import peak_resident_bytes

    counts = engine.counts
    return {
        "elapsed_s": seconds,
        **metrics.totals,
        "hits": counts.hits,
        "misses": counts.misses,
        "moved_bytes": [{"tier": tier, "moved_bytes": value} for tier, value in counts.moved_bytes.items()],
        "stalls": [{"cause": cause, "stall_s": spent} for cause, spent in counts.stall_s.items()],
        "peak_resident_bytes": peak_resident_bytes(),
    }
