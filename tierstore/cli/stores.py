"""``tierstore verify``, ``gc`` and ``reshard``: commands on a whole store, all of its ranks."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tierstore.cli.main import CHECK_FAILED, DONE
from tierstore.cli.options import NUMBERS, PATH, MemberOf, json_option
from tierstore.cli.output import Output
from tierstore.parallel.config import ParallelConfig, RowPlacement
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds

_SHOWN_FAILURES = 20  # the JSON object lists all failures


@click.command()
@click.argument("store", type=PATH)
@json_option
def verify(store: Path, output: Output) -> int:
    """Read and check every record of every snapshot of STORE (all ranks); exit status 1 if any is damaged."""
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
        output.table(
            "Drives",
            ("directory", "in use", "read", "bandwidth"),
            [
                (
                    drive.path,
                    format_bytes(drive.used_bytes),
                    format_bytes(drive.read_bytes),
                    f"{format_bytes(drive.bandwidth)}/s" if drive.bandwidth else "-",
                )
                for drive in report.drives
            ],
        )
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
@click.option("--dry-run", is_flag=True, help="Show what would be removed, but remove nothing.")
@json_option
def gc(store: Path, dry_run: bool, output: Output) -> None:
    """Remove what a crash left behind in STORE (all ranks) and return free space to the file system.

    Fails while STORE is in use. Unknown files are listed and kept. The next run reserves the space that it needs.
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


_PLACEMENTS = MemberOf(placement for placement in RowPlacement if placement is not RowPlacement.AUTO)


@click.command()
@click.argument("store", type=PATH)
@click.option("--to", "target", type=PATH, required=True, help="Directory of the new store; must not exist.")
@click.option("--ranks", type=int, help="Ranks of the new store (default: as in STORE).")
@click.option(
    "--expert",
    "--expert-ranks",
    "expert",
    type=int,
    default=0,
    help="Ranks that share one copy of the experts (0: all ranks of a stage).",
)
@click.option("--tensor", type=int, default=1, help="Tensor-parallel ranks, which divide each layer.")
@click.option("--stages", type=int, default=1, help="Pipeline stages.")
@click.option(
    "--stage-blocks", type=NUMBERS, metavar="N,N", help="Blocks in each stage (default: balanced by cost)."
)
@click.option(
    "--embedding", type=_PLACEMENTS, help="Placement of the embedding's rows (default: as in STORE)."
)
@click.option("--head", type=_PLACEMENTS, help="Placement of the head's rows (default: as in STORE).")
@click.option(
    "--moments",
    type=MemberOf(MomentFormat),
    help="Format of the experts' moments (default: as in STORE).",
)
@json_option
def reshard(
    store: Path,
    target: Path,
    ranks: int | None,
    expert: int,
    tensor: int,
    stages: int,
    stage_blocks: tuple[int, ...] | None,
    embedding: RowPlacement | None,
    head: RowPlacement | None,
    moments: MomentFormat | None,
    output: Output,
) -> None:
    """Reshard STORE for another layout of ranks, or convert its experts' moments to another format.

    Writes a new store, with dense parameters resliced and experts moved. STORE does not change.
    """
    if ranks is None and moments is None and embedding is None and head is None:
        raise click.UsageError("expected --ranks, --moments, --embedding or --head")
    if ranks is None and (expert, tensor, stages) != (0, 1, 1):
        raise click.UsageError("--expert, --tensor and --stages need --ranks")
    if stage_blocks is not None and stages == 1:
        raise click.UsageError("--stage-blocks needs --stages")
    if ranks is not None and ranks < 1:
        raise click.UsageError(f"--ranks: expected at least 1, got {ranks}")
    blocks = stage_blocks or ()
    wanted = ParallelConfig(expert=expert, tensor=tensor, stages=stages, stage_blocks=blocks)
    start = time.monotonic()
    with output.passing("reshard") as progress:
        from tierstore.hf.spec import stored_spec
        from tierstore.parallel.layout import layout_of
        from tierstore.train.resharding import reshard as make

        done = make(
            store,
            target,
            None if ranks is None else layout_of(wanted, ranks),
            progress,
            embedding=embedding,
            head=head,
            moments=moments,
            model=stored_spec(store),
            stage_blocks=blocks,
            announced=output.announce,
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{target}: step {done.step}, {done.before} to {done.after}, moments {done.moments.value}; wrote {done.records} "
        f"records, {format_bytes(done.nbytes)} in {format_seconds(elapsed_s)}"
    )
    held = output.compare(done.account)
    output.emit(
        {
            "store": target,
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
