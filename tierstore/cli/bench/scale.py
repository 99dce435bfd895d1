"""``tierstore bench scale``: how a store's costs grow with the number of its records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import (
    WORK_DIRECTORY,
    Reporting,
    results_options,
    work_directory_option,
)
from tierstore.cli.options import SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.bench.scale.run import ScaleResult


@click.command()
@click.option("--records", type=int, multiple=True, default=(1000, 10_000, 100_000), help="Sizes of stores.")
@click.option(
    "--decided", type=int, multiple=True, default=(1_000_000,), help="Further sizes, for decisions alone."
)
@click.option("--record-bytes", type=SIZE, default="12KiB", help="12 a parameter.")
@click.option(
    "--dirty-bytes",
    type=SIZE,
    multiple=True,
    default=("48KiB", "192KiB", "1MiB", "4MiB"),
    help="Sizes of the records that are dirty in further commits, in the store of the middle size.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lfu-decay", "next-use"),
    help="Cache policies whose decisions are timed.",
)
@click.option("--accesses", type=int, default=4000, help="Accesses to time, in each round.")
@click.option("--rounds", type=int, default=5)
@work_directory_option
@results_options()
def scale(
    records: tuple[int, ...],
    decided: tuple[int, ...],
    record_bytes: int,
    dirty_bytes: tuple[int, ...],
    policies: tuple[str, ...],
    accesses: int,
    rounds: int,
    store: Path | None,
    reporting: Reporting,
) -> None:
    """What one machine's store costs with 1,000 to 100,000 records: curves, and the exponents that fit them.

    The largest store takes 2.4 GB of disk by default. Decisions go on to a million records, without a store.
    """
    from tierstore.bench.scale.run import ScaleBench, measurements, run

    asked = ScaleBench(
        records=records,
        decided=decided,
        record_bytes=record_bytes,
        dirty_bytes=dirty_bytes,
        policies=policies,
        accesses=accesses,
        rounds=rounds,
    )
    directory = store or WORK_DIRECTORY
    session = reporting.begin(directory=directory)
    result = run(asked, directory, announce=session.output.line)
    show_scale(result, session.output)
    session.end(result, measurements(result))


def show_scale(result: ScaleResult, output: Output) -> None:
    """A row for each cost: its medians by size, its exponent and the most that the exponent may be."""
    from tierstore.bench.results.document import shown

    sizes = sorted({size for curve in result.curves.values() for size in curve.by_size})
    output.table(
        f"records of {format_bytes(result.record_bytes)}, policies {result.policies}",
        ("", *(f"{size:,}" for size in sizes), "n **", "limit"),
        [
            (
                name,
                *(shown(curve.by_size[size], curve.unit) if size in curve.by_size else "-" for size in sizes),
                f"{curve.exponent.value:.2f} +- {curve.exponent.spread:.2f}",
                f"{curve.limit:.2f}",
            )
            for name, curve in result.curves.items()
        ],
    )
    if result.dirty:
        whole = result.target_from_bytes
        from_size = f"from {format_bytes(whole)} on" if whole else "at none of these"
        output.table(
            f"commit to write, of {result.dirty[0].records:,} records 1% dirty: within its target {from_size}",
            ("dirty records of", "ratio"),
            [(format_bytes(one.record_bytes), f"{one.median:.2f}") for one in result.dirty],
        )
