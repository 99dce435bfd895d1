"""``tierstore gc STORE``: remove what a crash left behind."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.units import format_bytes


@click.command()
@click.argument("store", type=PATH)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@json_option
def gc(store: Path, dry_run: bool, output: Output) -> None:
    """Remove what a crash left of STORE, of all ranks if it has several, and give its free space back.

    Refused while STORE is in use. What is not known is named and left alone. The next run reserves again the space that
    it needs.
    """
    from tierstore.store.gc import Mode, collect

    report = collect(store, Mode.DRY_RUN if dry_run else Mode.REMOVE)
    for item in report.garbage:
        output.line(f"{item.path}: {item.what}, {format_bytes(item.nbytes)}")
    for reason in report.left:
        output.line(f"left alone: {reason}")
    output.line(f"{store}: {format_bytes(report.nbytes)} {'would be ' if dry_run else ''}given back")
    output.emit(
        {
            "store": str(store),
            "dry_run": dry_run,
            "freed_bytes": report.nbytes,
            "garbage": [
                {"path": str(item.path), "what": item.what, "disk_bytes": item.nbytes}
                for item in report.garbage
            ],
            "left": report.left,
        }
    )
