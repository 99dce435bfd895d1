"""``tierstore reshard``: the store of a training run, made over for another number of ranks."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds


@click.command()
@click.argument("store", type=PATH)
@click.option("--to", "target", type=PATH, required=True, help="The new store; must not exist.")
@click.option("--ranks", type=int, required=True, help="Ranks that it is for.")
@click.option(
    "--expert-ranks", type=int, default=0, help="Ranks that share one copy of the experts (0: all of them)."
)
@json_option
def reshard(store: Path, target: Path, ranks: int, expert_ranks: int, output: Output) -> None:
    """Make of STORE one for another number of ranks: dense slices re-cut, experts moved. STORE stays as it is."""
    from tierstore.hf.stored import stored_spec
    from tierstore.train.config import FinetuneConfig
    from tierstore.train.reshard import Layout
    from tierstore.train.reshard import reshard as make

    start = time.monotonic()
    with output.progress(0, label="reshard") as progress:
        done = make(
            store,
            target,
            Layout(ranks, expert_ranks or ranks),
            lambda written, total: progress.update(written, total, {}),
            model=stored_spec(store, FinetuneConfig()),
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{target}: step {done.step}, {done.before.ranks} to {done.after.ranks} ranks (expert groups of "
        f"{done.after.expert_ranks}); wrote {done.records} records, {format_bytes(done.nbytes)} in "
        f"{format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": str(target),
            "step": done.step,
            "ranks": done.after.ranks,
            "expert_ranks": done.after.expert_ranks,
            "ranks_before": done.before.ranks,
            "expert_ranks_before": done.before.expert_ranks,
            "records": done.records,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
        }
    )
