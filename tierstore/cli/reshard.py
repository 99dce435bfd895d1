"""``tierstore reshard``: the store of a training run, made over for another number of ranks or other moments."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds


@click.command()
@click.argument("store", type=PATH)
@click.option("--to", "target", type=PATH, required=True, help="The new store; must not exist.")
@click.option("--ranks", type=int, help="Ranks that it is for (default, with --moments: as many).")
@click.option(
    "--expert-ranks", type=int, default=0, help="Ranks that share one copy of the experts (0: all of them)."
)
@click.option(
    "--moments",
    type=click.Choice([moments.value for moments in MomentFormat]),
    help="How it keeps experts' moments (default: as STORE does).",
)
@json_option
def reshard(
    store: Path, target: Path, ranks: int | None, expert_ranks: int, moments: str | None, output: Output
) -> None:
    """Make of STORE one for another number of ranks, dense slices re-cut and experts moved, or one that keeps experts'
    moments in another format. STORE stays as it is.
    """
    from tierstore.hf.stored import stored_spec
    from tierstore.train.config import FinetuneConfig
    from tierstore.train.reshard import Layout
    from tierstore.train.reshard import reshard as make

    if ranks is None and moments is None:
        raise click.UsageError("expected --ranks or --moments")
    if ranks is None and expert_ranks:
        raise click.UsageError("--expert-ranks needs --ranks")
    start = time.monotonic()
    with output.progress(0, label="reshard") as progress:
        done = make(
            store,
            target,
            None if ranks is None else Layout(ranks, expert_ranks or ranks),
            lambda written, total: progress.update(written, total, {}),
            moments=None if moments is None else MomentFormat(moments),
            model=stored_spec(store, FinetuneConfig()),
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{target}: step {done.step}, {done.before.ranks} to {done.after.ranks} ranks (expert groups of "
        f"{done.after.expert_ranks}), moments {done.moments.value}; wrote {done.records} records, "
        f"{format_bytes(done.nbytes)} in {format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": str(target),
            "step": done.step,
            "ranks": done.after.ranks,
            "expert_ranks": done.after.expert_ranks,
            "ranks_before": done.before.ranks,
            "expert_ranks_before": done.before.expert_ranks,
            "moments": done.moments.value,
            "records": done.records,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
        }
    )
