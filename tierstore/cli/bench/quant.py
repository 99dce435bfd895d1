"""``tierstore bench quant``: products with quantised weights beside torch's in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.options import SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.quant import QuantResult


@click.command()
@click.option("--inputs", type=int, default=2048, help="Columns of a matrix.")
@click.option("--outputs", type=int, default=1536, help="Rows of a matrix.")
@click.option("--rows", type=int, multiple=True, default=(1, 8, 64), help="Tokens; repeatable.")
@click.option(
    "--weight-bytes", type=SIZE, default="256MiB", help="Of the matrices in bf16: more than caches hold."
)
@click.option("--threads", type=int, default=2)
@click.option("--repeats", type=int, default=7)
@results_options()
def quant(
    inputs: int,
    outputs: int,
    rows: tuple[int, ...],
    weight_bytes: int,
    threads: int,
    repeats: int,
    reporting: Reporting,
) -> None:
    """Products with weights in int8 and int4 against torch's in bf16 and a copy of memory; and their errors."""
    from tierstore.bench.quant import measurements, run

    session = reporting.begin()
    result = run(
        inputs=inputs,
        outputs=outputs,
        rows=rows,
        weight_bytes=weight_bytes,
        threads=threads,
        repeats=repeats,
    )
    _show(result, session.output)
    session.end(result, measurements(result))


def _show(result: QuantResult, output: Output) -> None:
    output.table(
        f"{result.matrices_count} matrices of {result.outputs_count} x {result.inputs_count}, {result.threads} threads, "
        f"{result.instruction_set}, torch {result.torch_version}, {result.repeats} rounds",
        ("", "rows", "a matrix", "weights", "GFLOP/s", "of torch's speed", "of copy's bandwidth"),
        [
            (
                times.contestant,
                f"{times.rows_count}",
                format_seconds(times.median_s / result.matrices_count),
                f"{format_bytes(times.weight_bytes_per_s)}/s",
                f"{times.flops_per_s / 1e9:.1f}" if times.flops_per_s else "",
                f"{times.speed_to_torch_ratio:.2f}",
                f"{times.bandwidth_to_copy_ratio:.2f}",
            )
            for times in result.products
        ],
    )
    for error in result.errors:
        output.line(
            f"{error.codes.value}: {error.bytes_per_parameter:.4f} bytes a weight; weights err by "
            f"{error.weight_error_ratio:.2%} (root mean square), a product in fp32 by {error.product_error_ratio:.1e} of "
            "the sum of its magnitudes"
        )
