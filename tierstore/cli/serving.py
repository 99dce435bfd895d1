"""``tierstore generate`` and ``serve``: generate text, or serve it over HTTP, from a store within a memory budget.

The first SIGINT or SIGTERM ends ``generate`` after the pass in progress, with the text so far and its table, and drains a
server. A second one exits at once. Under ``torchrun`` rank 0 does so for all ranks, and it alone prints and listens.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.capabilities import require_package
from tierstore.cli.main import DONE, INTERRUPTED, Interrupts
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    EXISTING_FILE,
    PATH,
    config_options,
    config_overrides,
    dataclass_options,
    deployed_settings,
    help_config_option,
    json_option,
    record_trace_option,
    set_option,
    timeline_option,
)
from tierstore.cli.output import Output
from tierstore.config import PathKind, load, option
from tierstore.deploy.records import Deployment
from tierstore.errors import ConfigError
from tierstore.machine import MemoryAccount, peak_resident_bytes
from tierstore.machine_profile import check_process_memory
from tierstore.serve.config import ServeConfig
from tierstore.timeline import open_timeline
from tierstore.units import format_bytes, format_seconds, printable

if TYPE_CHECKING:  # these import torch, which --help must not load
    from tierstore.model.spec import ModelSpec
    from tierstore.parallel import Mesh
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.batch import BatchRunner
    from tierstore.serve.engine import ServingEngine
    from tierstore.serve.generating import GeneratedText, GenerationTotals
    from tierstore.serve.language import Language
    from tierstore.serve.opening import ServedParts


def _served(store: Path, file: Path | None, overrides: Mapping[str, object], output: Output) -> ServeConfig:
    """The configuration for ``store``: from ``file``, or the settings that ``tierstore deploy`` chose; ``overrides`` win."""
    deployed = {} if file is not None else deployed_settings(store)
    if deployed:
        used = [f"{key} = {value}" for key, value in deployed.items() if key not in overrides]
        output.line(
            f"settings from {store / Deployment.NAME}: {', '.join(used) or 'none, options override all of them'}"
        )
    config = load(ServeConfig, file, {**deployed, **overrides})
    check_process_memory(config.memory)
    return config


def _launched(config: ServeConfig) -> AbstractContextManager[Mesh]:
    """This process among the ranks that torchrun started, if any."""
    from tierstore.parallel import ParallelConfig, launch

    return launch(ParallelConfig(), device=config.device)


def _follow(config: ServeConfig, mesh: Mesh, *, trace: Path | None, timeline: Path | None) -> None:
    """On a rank other than 0: make the passes of rank 0 until it ends."""
    from tierstore.serve.opening import open_runner, open_served
    from tierstore.train.ranks import rank_file

    rank = mesh.world.rank
    with (
        open_timeline(rank_file(timeline, rank)) as sink,
        open_served(config, mesh, trace=rank_file(trace, rank), timeline=sink) as parts,
    ):
        open_runner(parts).follow()
        parts.store.end_trace()


# tierstore generate -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """What to generate. None takes the value in the model's generation_config.json."""

    prompts: tuple[str, ...] = option(MISSING, "Prompt; repeat for a batch.", "--prompt")
    chat: bool = option(False, "Send each prompt through the chat template.")
    max_tokens: int = option(256, "Most tokens for each prompt.")
    temperature: float | None = option(
        None, "Sampling temperature; 0 takes the most probable token (default: the model's)."
    )
    top_k: int | None = option(None, "Sample from the N most probable tokens (0: all).")
    top_p: float | None = option(None, "Sample from the fewest tokens whose probabilities sum to X.")
    seed: int | None = option(None, "Sampling seed.")
    stop: tuple[str, ...] = option((), "End the text before this string; repeat for several.")


@click.command()
@click.argument("store", type=EXISTING_DIRECTORY)
@dataclass_options(_Prompts, "wanted")
@config_options(
    ServeConfig,
    {
        "--memory": "memory",
        "--host-budget": "host_budget",
        "--device-budget": "device_budget",
        "--batch-invariant": "batch.invariant",
        "--predictor": "prefetch.predictor",
    },
)
@timeline_option
@record_trace_option
@set_option()
@json_option
@help_config_option(ServeConfig)
@click.pass_context
def generate(
    ctx: click.Context,
    store: Path,
    wanted: _Prompts,
    given: dict[str, object],
    timeline: Path | None,
    record_trace: Path | None,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Generate text with the model in STORE, trained or imported.

    A single text is streamed; several are printed when all have ended. A table follows. With --json texts and table go to
    stderr. Under torchrun budgets are per rank.
    """
    output = output.of_first_rank()
    overrides = config_overrides(settings, {"store": store, **given})
    for key in overrides:
        if key.startswith("limits."):
            raise ConfigError(f"{key}: has effect in tierstore serve only")
    config = _served(store, None, overrides, output)
    from tierstore.serve.generating import TextGenerator
    from tierstore.serve.language import open_language
    from tierstore.serve.opening import open_runner, open_served, read_stored

    with Interrupts.install() as interrupts, ExitStack() as stack:
        mesh = stack.enter_context(_launched(config))
        spec = read_stored(store, mesh).spec
        language = open_language(spec)
        for line in language.lines:
            output.line(line)
        texts = _texts(wanted, language)
        config = _sized(config, texts, spec)
        if mesh.world.rank:
            _follow(config, mesh, trace=record_trace, timeline=timeline)
            return
        sink = stack.enter_context(open_timeline(timeline))
        with output.reserving() as populating:
            served = open_served(config, mesh, trace=record_trace, timeline=sink, populating=populating)
            parts = stack.enter_context(served)
        runner = open_runner(parts)
        account = parts.account(runner.model.context)
        _announce(parts, runner, account, output)
        alone = len(texts) == 1
        generator = TextGenerator(
            runner,
            end_tokens=language.end_tokens,
            added=lambda index, piece: output.write(piece) if alone else None,
            stopped=lambda: interrupts.requested,
        )
        generator.run(texts)
        runner.end()
        output.write("\n" if alone else "".join(f"[{index}] {one.text}\n" for index, one in enumerate(texts)))
        if any(made.reasoning and not made.text for made in texts):
            output.line("a text is empty: all of its tokens are reasoning, which --json shows")
        _table(parts, generator.totals, texts, output)
        output.emit({**_result(parts, generator.totals, texts), **output.compare(account)})
        parts.store.end_trace()
    ctx.exit(INTERRUPTED if interrupts.requested else DONE)


def _texts(wanted: _Prompts, language: Language) -> list[GeneratedText]:
    from tierstore.serve.generating import GeneratedText
    from tierstore.serve.sampling import TokenSampler

    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "seed")
        if (value := getattr(wanted, name)) is not None
    }
    sampling = replace(language.defaults, **given)
    texts = []
    for given_text in wanted.prompts:
        prompt = (
            language.encode_chat([{"role": "user", "content": given_text}])
            if wanted.chat
            else language.encode(given_text)
        )
        stream = language.text(wanted.stop, prompt=prompt, context=() if wanted.chat else prompt)
        texts.append(GeneratedText(prompt, wanted.max_tokens, TokenSampler(sampling, prompt), stream))
    return texts


def _sized(config: ServeConfig, texts: Sequence[GeneratedText], spec: ModelSpec) -> ServeConfig:
    """``config`` with the batch and the context that ``texts`` need, so that memory is not kept for more."""
    batch, longest = config.batch, spec.positions or spec.seq_len
    needed = max((len(text.prompt) + text.most for text in texts), default=0)
    context = batch.context or (needed if needed < longest else 0)
    sequences = min(batch.sequences, len(texts))
    prompts = sequences * max((len(text.prompt) for text in texts), default=0)
    return replace(
        config,
        batch=replace(batch, sequences=sequences, context=context),
        limits=replace(config.limits, prefill_tokens=max(prompts, 1)),
    )


def _announce(parts: ServedParts, runner: BatchRunner, account: MemoryAccount, output: Output) -> None:
    """Print the model and the memory that the run takes, before the first pass."""
    spec = parts.spec
    architecture = spec.architecture
    output.line(
        f"model: {architecture.parameters / 1e6:.1f} M parameters, {architecture.records} experts in "
        f"{len(spec.moe_layers)} layers, {spec.compute_dtype.value}, on {parts.device}"
    )
    if (ranks := parts.ranks_line) is not None:
        output.line(ranks)
    sequences, context = runner.sequences, runner.model.context
    several = "s" * (sequences > 1)
    output.line(f"{account.describe()}; at most {sequences} sequence{several} of {context} tokens")
    output.line(f"batch: {runner.describe()}")


def _table(
    parts: ServedParts, totals: GenerationTotals, texts: Sequence[GeneratedText], output: Output
) -> None:
    stats = parts.store.cache.residency.stats()
    asked = stats.hits + stats.misses
    first = [made.first_s for made in texts if made.first_s is not None]
    output.line()
    output.table(
        "",
        ("prefill", "decode", "first token", "hits", "read", "stalls", "peak memory"),
        [
            (
                _rate(totals.prefill_rate),
                _rate(totals.decode_rate),
                format_seconds(max(first)) if first else "-",
                f"{stats.hits / asked:.0%}" if asked else "-",
                format_bytes(stats.read_bytes),
                format_seconds(parts.ledger.total_s),
                format_bytes(peak_resident_bytes()),
            )
        ],
    )


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"


def _result(
    parts: ServedParts,
    totals: GenerationTotals,
    texts: Sequence[GeneratedText],
) -> dict[str, object]:
    stats, guesses = parts.store.cache.residency.stats(), parts.experts.guesses
    return {
        "store": str(parts.config.store),
        "texts": [
            {
                "text": made.text,
                "reasoning": made.reasoning,
                "tokens": made.tokens,
                "prompt_tokens": len(made.prompt),
                "ending": made.ending.value,
                "first_token_s": made.first_s,
            }
            for made in texts
        ],
        **asdict(totals),
        "hits": stats.hits,
        "misses": stats.misses,
        "mapped_count": parts.store.mapped.leases,
        "mapped_bytes": parts.store.mapped.leased_bytes,
        "read_bytes": stats.read_bytes,
        "prefetch_read_bytes": stats.prefetch_read_bytes,
        "wasted_prefetch_bytes": stats.wasted_prefetch_bytes,
        "guesses": {"used": guesses.used, "guessed": guesses.guessed, "right": guesses.right},
        "stall_s": parts.ledger.total_s,
    }


# tierstore serve --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Listening:
    """Where a server listens, and who may use it."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "TCP port (0: any free port).", least=0, most=65535)
    api_keys: Path | None = option(
        None, "File of API keys, one per line; requests must send one.", path=PathKind.EXISTING_FILE
    )
    name: str | None = option(None, "Model name in requests (default: the store's directory).")


@click.command()
@click.argument("store", type=PATH)
@click.option("--config", type=EXISTING_FILE, help="TOML file of configuration keys.")
@dataclass_options(_Listening, "listening")
@record_trace_option
@timeline_option
@config_options(
    ServeConfig,
    {
        "--memory": "memory",
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
@help_config_option(ServeConfig)
def serve(
    store: Path,
    config: Path | None,
    listening: _Listening,
    record_trace: Path | None,
    timeline: Path | None,
    given: dict[str, object],
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Serve the model in STORE, trained or imported, over an OpenAI-compatible API; the path / is a page to try it.

    STORE is opened read-only, so several servers may share it. Under torchrun budgets are per rank.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "tierstore serve", extra="serve")
    output = output.of_first_rank()
    served = _served(store, config, config_overrides(settings, {"store": store, **given}), output)
    from tierstore.serve.api.app import Keys, Service
    from tierstore.serve.api.metrics import ServerMetrics
    from tierstore.serve.api.server import ApiServer, ServerLog, is_loopback, listen, url
    from tierstore.serve.engine import ServingEngine
    from tierstore.serve.opening import open_running

    keys = Keys() if listening.api_keys is None else Keys.read(listening.api_keys)
    metrics, log, begun_s = ServerMetrics(), ServerLog(), time.monotonic()
    with ExitStack() as stack:
        mesh = stack.enter_context(_launched(served))
        if mesh.world.rank:
            with Interrupts.install():
                _follow(served, mesh, trace=record_trace, timeline=timeline)
            return
        bound = stack.enter_context(listen(listening.host, listening.port))
        if not is_loopback(bound) and not keys.required:
            warnings.warn(
                f"listening on {listening.host}, which other machines can reach, without authentication; set --api-keys",
                stacklevel=1,
            )
        populating = stack.enter_context(output.reserving())
        engine = ServingEngine(
            lambda: open_running(served, mesh, trace=record_trace, timeline=timeline, populating=populating),
            sequences=served.batch.sequences,
            limits=served.limits,
            metrics=metrics,
            log=log.write,
        )
        stack.enter_context(engine)
        metrics.show(engine)
        name = printable(listening.name or served.store.resolve().name)

        def opened() -> None:
            for line in engine.running.lines:
                output.line(line)
            output.announce(engine.running.account)
            output.line(f"opened in {format_seconds(time.monotonic() - begun_s)}")
            output.line(f"serving {name} at {url(bound)}")

        service = Service(
            engine=engine, metrics=metrics, limits=served.limits, keys=keys, model=name, log=log
        )
        server = ApiServer(service.app(), engine, served.limits, opened=opened)
        asyncio.run(server.serve([bound]))
    output.line(f"stopped after {format_seconds(time.monotonic() - begun_s)}")
    held = output.compare(engine.running.account) if engine.opened else {}
    output.emit({**_totals(engine, metrics, seconds=time.monotonic() - begun_s), **held})


def _totals(engine: ServingEngine, metrics: ServerMetrics, *, seconds: float) -> dict[str, object]:
    counts = engine.counts
    return {
        "elapsed_s": seconds,
        **metrics.totals,
        "hits": counts.hits,
        "misses": counts.misses,
        "mapped_count": counts.mapped,
        "mapped_bytes": counts.mapped_bytes,
        "moved_bytes": [{"tier": tier, "moved_bytes": value} for tier, value in counts.moved_bytes.items()],
        "stalls": [{"cause": cause, "stall_s": spent} for cause, spent in counts.stall_s.items()],
        "peak_resident_bytes": peak_resident_bytes(),
    }
