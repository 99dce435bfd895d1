"""``tierstore verify``, ``gc`` and ``reshard``: commands on a whole store, all of its ranks."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass
from pathlib import Path

import click

from tierstore.cli.main import CHECK_FAILED, DONE
from tierstore.cli.options import NUMBERS, PATH, dataclass_options, json_option
from tierstore.cli.output import Output
from tierstore.config import option
from tierstore.parallel.config import ParallelConfig, RowPlacement
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds

_SHOWN_FAILURES = 20  # the JSON object lists all failures


@click.command()
@click.argument("store", type=PATH)
@json_option
def verify(store: Path, output: Output) -> int:
    """Read and check every record of every snapshot of STORE (all ranks)."""
    start = time.monotonic()
    with output.passing("verify") as progress:
        from tierstore.store.parameter_store import verify_all

        report = verify_all(store, progress=progress, announced=output.announce)
    elapsed_s = time.monotonic() - start
    for failure in report.failures[:_SHOWN_FAILURES]:
        output.line(f"corrupt: {failure}")
    hidden = len(report.failures) - _SHOWN_FAILURES
    if hidden > 0:
        output.line(f"and {hidden} more")
    output.line(
        f"{store}: {report.records} records, {report.sections} sections, {report.snapshots} snapshots; "
        f"read {format_bytes(report.bytes_read)} in {format_seconds(elapsed_s)}; "
        + (f"{len(report.failures)} failures" if report.failures else "all intact")
    )
    held = output.compare(report.account)
    if len(report.drives) > 1:
        output.drives("Drives", report.drives)
    output.emit(
        {
            "store": store,
            "records": report.records,
            "sections": report.sections,
            "snapshots": report.snapshots,
            "read_bytes": report.bytes_read,
            **held,
            "elapsed_s": elapsed_s,
            "failures": report.failures,
            "drives": report.drives,
        }
    )
    return CHECK_FAILED if report.failures else DONE


@click.command()
@click.argument("store", type=PATH)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@json_option
def gc(store: Path, dry_run: bool, output: Output) -> None:
    """Remove what a crash left behind in STORE (all ranks) and return free space to the file system.

    Fails while STORE is in use. Unknown files are listed and kept. The next run reserves its space again.
    """
    from tierstore.store.gc import Mode, collect

    report = collect(store, Mode.DRY_RUN if dry_run else Mode.REMOVE)
    for item in report.garbage:
        output.line(f"{item.path}: {item.what}, {format_bytes(item.nbytes)}")
    for reason in report.left:
        output.line(f"kept: {reason}")
    output.line(f"{store}: {format_bytes(report.nbytes)} {'would be ' if dry_run else ''}freed")
    output.emit(
        {
            "store": store,
            "dry_run": dry_run,
            "freed_bytes": report.nbytes,
            "garbage": [
                {"path": item.path, "what": item.what, "disk_bytes": item.nbytes} for item in report.garbage
            ],
            "left": report.left,
        }
    )


_PLACEMENTS = tuple(placement for placement in RowPlacement if placement is not RowPlacement.AUTO)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The layout and the formats of the new store."""

    target: Path = option(MISSING, "Directory to create.", "--to")
    ranks: int | None = option(None, "Ranks of the new store (default: as in STORE).")
    expert: int = option(
        0,
        "Ranks that share a copy of the experts (0: all of a stage).",
        "--expert",
        "--expert-ranks",
    )
    tensor: int = option(1, "Tensor-parallel ranks, which divide each layer.")
    stages: int = option(1, "Pipeline stages.")
    stage_blocks: tuple[int, ...] = option(
        (),
        "Blocks in each stage (default: balanced by cost).",
        click={"type": NUMBERS, "metavar": "N,N", "multiple": False},
    )
    embedding: RowPlacement | None = option(
        None, "Placement of the embedding's rows (default: as in STORE).", choices=_PLACEMENTS
    )
    head: RowPlacement | None = option(
        None, "Placement of the head's rows (default: as in STORE).", choices=_PLACEMENTS
    )
    moments: MomentFormat | None = option(None, "Format of the experts' moments (default: as in STORE).")


@click.command()
@click.argument("store", type=PATH)
@dataclass_options(_Layout, "asked")
@json_option
def reshard(store: Path, asked: _Layout, output: Output) -> None:
    """Write STORE for another layout of ranks, or with moments in another format, as a new store."""
    if asked.ranks is None and asked.moments is None and asked.embedding is None and asked.head is None:
        raise click.UsageError("expected --ranks, --moments, --embedding or --head")
    if asked.ranks is None and (asked.expert, asked.tensor, asked.stages) != (0, 1, 1):
        raise click.UsageError("--expert, --tensor and --stages need --ranks")
    if asked.stage_blocks and asked.stages == 1:
        raise click.UsageError("--stage-blocks needs --stages")
    if asked.ranks is not None and asked.ranks < 1:
        raise click.UsageError(f"--ranks: expected at least 1, got {asked.ranks}")
    wanted = ParallelConfig(
        expert=asked.expert, tensor=asked.tensor, stages=asked.stages, stage_blocks=asked.stage_blocks
    )
    start = time.monotonic()
    with output.passing("reshard") as progress:
        from tierstore.hf.spec import stored_spec
        from tierstore.parallel.layout import layout_of
        from tierstore.train.resharding import reshard as make

        done = make(
            store,
            asked.target,
            None if asked.ranks is None else layout_of(wanted, asked.ranks),
            progress,
            embedding=asked.embedding,
            head=asked.head,
            moments=asked.moments,
            model=stored_spec(store),
            stage_blocks=asked.stage_blocks,
            announced=output.announce,
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{asked.target}: step {done.step}, {done.before} to {done.after}, moments {done.moments.value}; wrote "
        f"{done.records} records, {format_bytes(done.nbytes)} in {format_seconds(elapsed_s)}"
    )
    held = output.compare(done.account)
    output.emit(
        {
            "store": asked.target,
            "step": done.step,
            **done.after.as_json(),
            **{f"{name}_before": count for name, count in done.before.as_json().items()},
            "moments": done.moments,
            "records": done.records,
            "written_bytes": done.nbytes,
            **held,
            "elapsed_s": elapsed_s,
        }
    )
