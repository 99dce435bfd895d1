"""``tierstore verify STORE``: read every record of every snapshot, and check it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

_SHOWN_FAILURES = 20  # beyond these a person reads no more; the JSON object has them all
_CHECK_FAILED = 1


@click.command()
@click.argument("store", type=PATH)
@json_option
def verify(store: Path, output: Output) -> int:
    """Read and check every record of every snapshot of STORE, of all ranks if it has several; exit status 1 if any is
    not whole.
    """
    from tierstore.store.parameter_store import verify_all

    start = time.monotonic()
    with output.progress(0, label="verify") as progress:
        report = verify_all(store, progress=lambda done, total: progress.update(done, total, {}))
    elapsed_s = time.monotonic() - start
    for failure in report.failures[:_SHOWN_FAILURES]:
        output.line(f"corrupt: {failure}")
    hidden = len(report.failures) - _SHOWN_FAILURES
    if hidden > 0:
        output.line(f"and {hidden} more")
    output.line(
        f"{store}: {report.records} records, {report.sections} sections, {report.snapshots} snapshots; "
        f"read {format_bytes(report.bytes_read)} in {format_seconds(elapsed_s)}; "
        + (f"{len(report.failures)} failures" if report.failures else "all whole")
    )
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
            "store": str(store),
            "records": report.records,
            "sections": report.sections,
            "snapshots": report.snapshots,
            "read_bytes": report.bytes_read,
            "elapsed_s": elapsed_s,
            "failures": report.failures,
            "drives": [drive.as_json() for drive in report.drives],
        }
    )
    return _CHECK_FAILED if report.failures else 0
