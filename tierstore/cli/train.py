"""``tierstore train``: train a model.

SIGINT or SIGTERM ends the run after the step in progress, with a commit; a second one exits at once. Under ``torchrun``
a signal to one rank ends all ranks, and only rank 0 prints.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.main import DONE, INTERRUPTED, Interrupts
from tierstore.cli.options import (
    PATH,
    checksum_option,
    config_options,
    config_overrides,
    help_config_option,
    json_option,
    output_file,
    record_trace_option,
    set_option,
    timeline_option,
    with_stored_model,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.devices import disk_health, disks_under
from tierstore.machine import disk, existing_parent
from tierstore.machine_profile import check_process_memory
from tierstore.outputs import OutputKind
from tierstore.stats import OnProgress
from tierstore.timeline import TimelineSink, open_timeline
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # these import torch, which --help must not load
    from tierstore.machine import MemoryAccount
    from tierstore.parallel import Mesh
    from tierstore.store.core import StoreCore
    from tierstore.train.ranks import Opening
    from tierstore.train.report import MetricsLog, RunSummary
    from tierstore.train.trainer import Trainer

_PROMPT = "def "


@click.command()
@click.argument("config", required=False, type=PATH)
@config_options(
    TrainConfig,
    {
        "--data": ("data.paths", {"type": click.STRING}),  # file names need not be UTF-8
        "--store": "store",
        "--steps": "steps",
        "--memory": "memory",
        "--host-budget": "host_budget",
        "--device-budget": "device_budget",
        "--lora": ("lora.rank", {"metavar": "RANK"}),
        "--commit-every": "commit_every",
    },
)
@click.option("--resume", is_flag=True, help="Continue from the store's last commit.")
@checksum_option
@click.option("--metrics", type=output_file(OutputKind.METRICS), help="Append one JSON line per step.")
@timeline_option
@record_trace_option
@set_option()
@json_option
@help_config_option(TrainConfig)
@click.pass_context
def train(
    ctx: click.Context,
    config: Path | None,
    given: dict[str, object],
    resume: bool,
    checksum: bool,
    metrics: Path | None,
    timeline: Path | None,
    record_trace: Path | None,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Train a Mixture-of-Experts model whose experts live on disk.

    Without arguments, train a byte-level model several times larger than its host budget on Python's standard library, into
    ./tierstore-store. A store made by tierstore import trains the imported model; its first run needs no --resume.
    """
    loaded = load(TrainConfig, config, config_overrides(settings, given))
    check_process_memory(loaded.memory)
    loaded = with_stored_model(loaded)
    from tierstore.parallel import launch, limited_groups
    from tierstore.train.ranks import Opening, rank_file

    # Ranks must end together: from here on a signal to one rank ends all.
    groups = limited_groups(loaded.links)
    with (
        Interrupts.install() as interrupts,
        launch(loaded.parallel, device=loaded.device, make_group=groups) as mesh,
    ):
        output = output.of_first_rank()
        # A rank cannot tell whether torchrun has restarted the job: each agent has its own count.
        again = Opening.RESTART if mesh.environment.supervised else Opening.CREATE
        opening = Opening.RESUME if resume else again
        summary, stopped = _train(
            loaded,
            output,
            opening,
            mesh,
            interrupts,
            metrics=rank_file(metrics, mesh.world.rank),
            timeline=rank_file(timeline, mesh.world.rank),
            trace=rank_file(record_trace, mesh.world.rank),
            checksum=checksum,
        )
        _show(summary, output)
        output.emit(summary.as_json())
    if not stopped:
        return
    why = "by a signal" if interrupts.requested else "with another rank"
    output.line(f"stopped {why} after step {summary.steps}, committed; continue with --resume")
    # torchrun takes any other status for a failure and would restart the ranks.
    ctx.exit(DONE if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else INTERRUPTED)


def _train(
    config: TrainConfig,
    output: Output,
    opening: Opening,
    mesh: Mesh,
    interrupts: Interrupts,
    *,
    metrics: Path | None,
    timeline: Path | None,
    trace: Path | None,
    checksum: bool,
) -> tuple[RunSummary, bool]:
    """Run the training; returns its result and whether a signal ended it early."""
    from tierstore.machine import keep_freed_memory
    from tierstore.plan.order import agreed_order, in_order, order_lines
    from tierstore.train.report import Instant, MetricsLog, RunSummary, totals
    from tierstore.train.session import open_session
    from tierstore.train.trainer import records_checksum

    keep_freed_memory()
    order = agreed_order(config, mesh)
    config = in_order(config, order)
    tokenising, creating = output.progress(label="tokenise (bytes)"), output.progress(label="create experts")

    def accepted(account: MemoryAccount) -> None:
        tokenising.close()
        _announce(config, account, output, mesh)
        for line in order_lines(order):
            output.line(line)

    def interruptible(progress: OnProgress) -> OnProgress:
        def called(done: int, total: int) -> None:
            progress(done, total)
            # Several ranks go on to their first commit, where they agree.
            if interrupts.requested and mesh.world.size == 1:
                output.line("stopped by a signal before the first step; nothing was created or changed")
                raise SystemExit(INTERRUPTED)

        return called

    with (
        tokenising,
        output.reserving() as reserving,
        creating,
        open_timeline(timeline) as sink,
        MetricsLog(metrics) as log,
        open_session(
            config,
            opening,
            mesh=mesh,
            trace=trace,
            timeline=sink,
            accepted=accepted,
            tokenising=tokenising.update,
            populating=interruptible(reserving),
            creating=interruptible(creating.update),
        ) as trainer,
    ):
        creating.close()
        _describe_opened(trainer, output)
        log.start(trainer)
        first, begun = trainer.state.position, Instant.now(trainer)
        stopped, failure = _steps(config, output, trainer, log, sink, interrupts)
        if not stopped:
            trainer.evaluate()
        trainer.commit()
        try:
            trainer.store.end_trace()
        except OSError as error:
            failure = error
        ended = totals(trainer, begun)
        crc = None
        if checksum and not stopped:
            with output.passing("checksum") as progress:
                crc = records_checksum(trainer, progress=progress, stopped=lambda: interrupts.requested)
            stopped = crc is None
        state, exchange = trainer.state, trainer.mesh.exchange_choice
        summary = RunSummary(
            config=config,
            steps=state.position,
            train_loss=state.train_loss,
            val_loss=state.val_loss,
            tokens=config.tokens_per_step * (state.position - first),
            account=trainer.account,
            totals=ended,
            records_crc32c=crc,
            tasks=dict(state.tasks),
            micro_order_reason=order.reason,
            chunks=trainer.chunks.chosen,
            exchange=None if exchange is None else f"{exchange.name}: {exchange.value}: {exchange.reason}",
        )
        if config.sample_tokens and not stopped:
            output.line(f"sample: {_PROMPT}{trainer.sample(_PROMPT, config.sample_tokens)}")
        if failure is not None:
            with contextlib.suppress(OSError):
                output.line(f"ended after step {summary.steps}, committed; continue with --resume")
            raise failure
    return summary, stopped


def _steps(
    config: TrainConfig,
    output: Output,
    trainer: Trainer,
    log: MetricsLog,
    sink: TimelineSink,
    interrupts: Interrupts,
) -> tuple[bool, OSError | None]:
    """Train to the last step, until a signal reaches any rank, or until a rank fails to write one of its files.

    Returns whether the steps ended early, and this rank's error, if any.
    """
    from tierstore.train.report import counters

    begun, first = time.monotonic(), trainer.state.position
    failure: OSError | None = None
    with output.progress(label="train") as progress:
        while trainer.state.position < config.steps:
            if trainer.mesh.world.any(interrupts.requested or failure is not None):
                return True, failure
            result = trainer.step()
            done = trainer.state.position
            val_loss = None
            if config.eval_every and done % config.eval_every == 0 and done < config.steps:
                val_loss = trainer.evaluate()
            counts = counters(trainer)
            try:
                progress.update(
                    done,
                    config.steps,
                    {
                        "loss": result.loss,
                        "val": trainer.state.val_loss if trainer.state.val_loss is not None else "-",
                        "tokens/s": config.tokens_per_step * (done - first) / (time.monotonic() - begun),
                        "hits": f"{counts['hits'] / max(counts['hits'] + counts['misses'], 1):.0%}",
                        "read": format_bytes(counts["read_bytes"]),
                        "written": format_bytes(counts["written_bytes"]),
                    },
                )
                log.record(trainer, result, val_loss)
            except OSError as error:
                failure = error
            failure = failure or sink.failure or trainer.store.trace_failure
            chunks = trainer.chunks.chosen
            if config.snapshot_every and done % config.snapshot_every == 0:
                trainer.commit(snapshot=f"step-{done}")
            elif config.commit_every and done % config.commit_every == 0 and done < config.steps:
                trainer.commit()
            chosen = trainer.chunks.chosen
            if chosen is not None and chunks is not None and chosen.value != chunks.value:
                output.line(f"step {done}: {chosen.describe()}")
    return False, failure


def _announce(config: TrainConfig, account: MemoryAccount, output: Output, mesh: Mesh) -> None:
    """Print what the run of ``config`` will take, before its first write."""
    from tierstore.moe.products import slow_products
    from tierstore.store.disk.home import rank_directory
    from tierstore.store.disk.store_extents import copies, schema_copies
    from tierstore.train.budgets import expert_schema, pair_schema
    from tierstore.train.stages import stage_blocks, stage_config

    model, experts, pairs = config.model, expert_schema(config), pair_schema(config)
    records = model.architecture.records * experts.record_bytes
    placed = stage_config(config, mesh.pipeline.rank, mesh.stages)
    owned = len(mesh.blocks(model.experts).owned(mesh.expert.rank)) * len(placed.model.moe_layers)
    kept = schema_copies(experts, copies(config.retain))
    own = owned * experts.record_bytes
    output.line(
        f"model: {model.architecture.parameters / 1e6:.1f} M parameters, {model.architecture.records} experts in "
        f"{len(model.moe_layers)} layers, {format_bytes(records)} of expert records, {model.compute_dtype.value}"
    )
    if slow := slow_products(model.compute_dtype.torch, mesh.device):
        output.line(slow)
    if mesh.world.size > 1:
        output.line(
            f"ranks: {mesh.world.size}, in {mesh.replicas} expert group{'s' * (mesh.replicas > 1)} of "
            f"{mesh.expert.size}{', which are tensor-parallel' * (mesh.tensor.size > 1)}; budgets and memory below are "
            "per rank"
        )
    if mesh.exchange_choice is not None:
        output.line(mesh.exchange_choice.describe())
    if mesh.stages > 1:
        blocks = stage_blocks(model.architecture, mesh.stages, config.parallel.stage_blocks)
        cut = ", ".join(f"{each.start} to {each.stop - 1}" for each in blocks)
        output.line(
            f"pipeline: {mesh.stages} stages with blocks {cut}; 1F1B over {config.data.micro_batches} micro-batches"
        )
    output.announce(account)
    cache = config.cache
    output.line(f"cache policy: {cache.summary}, {cache.scope.value} scope")
    if cache.device_policy:
        output.line(f"policy of device slots: {cache.of_device.summary}")
    if cache.starvation_warning is not None:
        output.line(f"warning: {cache.starvation_warning}")
    limits = config.links.describe()
    if limits is not None:
        output.line(limits)
    names = [config.store, *config.stripe.directories]
    places = [existing_parent(rank_directory(name, mesh.world.rank, mesh.world.size)) for name in names]
    free = " and ".join(format_bytes(disk(place).free_bytes) for place in places)
    output.line(
        f"disk: {format_bytes(kept * own)} for {kept} cop{'ies' if kept > 1 else 'y'} in "
        f"{', '.join(map(str, names))}; {free} free"
    )
    if config.lora.enabled:
        beside = 0 if pairs is None else owned * pairs.record_bytes
        output.line(
            f"LoRA: rank {config.lora.rank}, {config.lora.targets.value}; experts are frozen; their pairs are "
            f"{format_bytes(beside)} of records"
        )


def _describe_opened(trainer: Trainer, output: Output) -> None:
    """Print what the run found and decided when it opened, before its first step."""
    from tierstore.train.elastic import describe_restart

    if trainer.resharded_from is not None:
        output.line(describe_restart(trainer.resharded_from))
    output.line(f"data: {trainer.data.describe()}")
    if trainer.tasks is not None:
        output.line(f"tasks: {trainer.tasks.assignment.describe()}")
    _describe(trainer.store, output)
    schedule = trainer.config.schedule
    lowest = schedule.lowest_from
    if lowest is not None and lowest < trainer.config.steps:
        output.line(
            f"learning rate: stays at its minimum, {schedule.lr_at(lowest):g}, from step {lowest + 1} on: it has decayed by "
            f"schedule.total_steps = {schedule.total_steps}"
        )
    output.line(trainer.describe_weights())
    if (line := trainer.vocabulary.describe()) is not None:
        output.line(line)
    output.line(trainer.timer.describe())
    if trainer.chunks.chosen is not None:
        output.line(trainer.chunks.chosen.describe())


def _describe(store: StoreCore, output: Output) -> None:
    for line in store.describe():
        output.line(line)
    seen: dict[str, Path] = {}
    for drive in store.extents.drive_reports():
        for found in disks_under(drive.path):
            if found.name in seen:
                other = seen[found.name]
                output.line(
                    f"warning: {drive.path} and {other} are on the same disk, {found.name}: striping is no faster"
                )
                continue
            seen[found.name] = drive.path
            for warning in disk_health(found).warnings:
                output.line(f"warning: {found.name} {found.model} under {drive.path}: {warning}")


def _show(summary: RunSummary, output: Output) -> None:
    from tierstore.train.report import step_rows, task_rows_of, tier_rows

    loss = "-" if summary.val_loss is None else f"{summary.val_loss:.4f}"
    output.table(
        f"{summary.steps} steps, {format_seconds(summary.totals.seconds)}, validation loss {loss} nats a token",
        ("tier", "total"),
        tier_rows(summary),
    )
    if summary.config.tasks:
        titles = ("task", "rows", "examples", "tokens", "train loss", "validation loss")
        output.table("tasks", titles, task_rows_of(summary))
    if summary.totals.stalls:
        output.table(
            "longest stalls",
            ("dimension", "layer", "tier", "cause", "time"),
            [
                (
                    stall["dimension"],
                    stall["layer"] if stall["layer"] is not None else "-",
                    stall["tier"],
                    stall["cause"],
                    format_seconds(float(str(stall["stall_s"]))),
                )
                for stall in summary.totals.stalls[:8]
            ],
        )
    if summary.totals.step_time is not None:
        whole = format_seconds(summary.totals.step_time.wall_s)
        output.table(
            f"where {whole} of steps went", ("part", "time", "share"), step_rows(summary.totals.step_time)
        )
    output.drives("drives", summary.totals.drives)
