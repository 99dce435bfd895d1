"""``tierstore serve``: the HTTP server over a store.

The first SIGTERM or SIGINT drains it, the second ends it at once.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.capabilities import require_package
from tierstore.cli.models import deployed_settings, describe_settings
from tierstore.cli.options import (
    EXISTING_FILE,
    PATH,
    SIZE,
    TEXT,
    bundled,
    config_overrides,
    help_config_option,
    json_option,
    options,
    output_file,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.outputs import OutputKind
from tierstore.units import format_seconds, printable

if TYPE_CHECKING:
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.config import ServeConfig
    from tierstore.serve.scheduler.engine import ServingEngine


def serve_config() -> type[Any]:
    """The configuration of a server, for ``help_config_option``."""
    from tierstore.serve.config import ServeConfig

    return ServeConfig


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, whom it answers, and what it writes besides."""

    host: str
    port: int
    api_keys: Path | None
    name: str | None
    record_trace: Path | None
    timeline: Path | None


_listening_options = options(
    click.option("--host", default="127.0.0.1", help="Address to listen on."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0 takes one that is free."
    ),
    click.option("--api-keys", type=EXISTING_FILE, help="File of keys, one a line; a request must bear one."),
    click.option("--name", type=TEXT, help="The model's name in requests (default: the store's directory)."),
    click.option(
        "--record-trace", type=output_file(OutputKind.TRACE), help="Record every cache decision's input."
    ),
    click.option(
        "--timeline", type=output_file(OutputKind.TIMELINE), help="Write a Chrome trace for Perfetto."
    ),
)


@click.command()
@click.argument("store", type=PATH)
@click.option("--config", type=EXISTING_FILE, help="TOML file of configuration keys.")
@_listening_options
@click.option("--host-budget", type=SIZE, help="Memory for experts: cache, CPU device tier.")
@click.option("--device-budget", type=SIZE, help="Memory for experts on the device.")
@click.option("--batch-size", type=int, help="Most sequences of a batch.")
@click.option("--context", type=int, help="Most tokens of a sequence, prompt and answer.")
@click.option("--batch-invariant", is_flag=True, help="Give each request the bits that it gets alone.")
@click.option("--max-queue", type=int, help="Most requests that wait.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.")
@click.option("--request-timeout", type=float, metavar="SECONDS", help="Most seconds of a request.")
@set_option()
@json_option
@help_config_option(serve_config)
@bundled(Listening, "listening")
def serve(
    store: Path,
    config: Path | None,
    listening: Listening,
    host_budget: int | None,
    device_budget: int | None,
    batch_size: int | None,
    context: int | None,
    batch_invariant: bool,
    max_queue: int | None,
    max_tokens: int | None,
    request_timeout: float | None,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Answer OpenAI's API from STORE, trained or imported, in the memory you give; with a page to try it at /.

    The store is opened for reading only: several servers may have it open, and none writes to it.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "tierstore serve", extra="serve")
    given: Mapping[str, object] = {
        "store": store,
        "host_budget": host_budget,
        "device_budget": device_budget,
        "batch.sequences": batch_size,
        "batch.context": context,
        "batch.invariant": batch_invariant or None,
        "limits.queue": max_queue,
        "limits.tokens": max_tokens,
        "limits.request_s": request_timeout,
    }
    deployed = {} if config is not None else deployed_settings(store)
    overrides = config_overrides(settings, given)
    served = load(serve_config(), config, {**deployed, **overrides})
    if deployed:
        output.line(describe_settings(store, deployed, overrides))
    _run(served, listening, output)


def _run(config: ServeConfig, listening: Listening, output: Output) -> None:
    from tierstore.serve.api.app import Service, make_app
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.api.receiving import Keys
    from tierstore.serve.api.server import ApiServer, is_loopback, listen, url
    from tierstore.serve.scheduler.engine import ServingEngine
    from tierstore.serve.scheduler.opening import open_running

    keys = Keys() if listening.api_keys is None else Keys.read(listening.api_keys)
    metrics, begun_s = ServerMetrics(), time.monotonic()
    with ExitStack() as stack:
        bound = stack.enter_context(listen(listening.host, listening.port))
        if not is_loopback(bound) and not keys.required:
            warnings.warn(
                f"{listening.host} can be reached from other machines, and whoever can may ask: --api-keys asks for keys",
                stacklevel=1,
            )
        engine = ServingEngine(
            lambda: open_running(config, trace=listening.record_trace, timeline=listening.timeline),
            sequences=config.batch.sequences,
            limits=config.limits,
            watcher=metrics,
        )
        stack.enter_context(engine)
        metrics.show(engine)
        name = printable(listening.name or config.store.resolve().name)

        def opened() -> None:
            for line in engine.running.lines:
                output.line(line)
            output.line(f"opened in {format_seconds(time.monotonic() - begun_s)}")
            output.line(f"serving {name} at {url(bound)}")

        service = Service(engine=engine, metrics=metrics, limits=config.limits, keys=keys, model=name)
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
