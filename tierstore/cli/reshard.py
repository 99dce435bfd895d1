"""``tierstore reshard``: the store of a training run, made over for another layout of ranks or other moments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.parallel.config import RowPlacement
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.parallel.layout import Layout


_PLACES = click.Choice([placement.value for placement in RowPlacement if placement is not RowPlacement.AUTO])


@click.command()
@click.argument("store", type=PATH)
@click.option("--to", "target", type=PATH, required=True, help="The new store; must not exist.")
@click.option("--ranks", type=int, help="Ranks that it is for (default, with --moments: as many).")
@click.option(
    "--expert",
    "--expert-ranks",
    "expert",
    type=int,
    default=0,
    help="Ranks that share one copy of the experts (0: all of a stage).",
)
@click.option("--tensor", type=int, default=1, help="Ranks that divide each layer.")
@click.option("--stages", type=int, default=1, help="Pipeline stages.")
@click.option("--stage-blocks", metavar="N,N", help="Blocks of each stage (default: balanced by cost).")
@click.option("--embedding", type=_PLACES, help="Where the rows of the embedding lie (default: as in STORE).")
@click.option("--head", type=_PLACES, help="The same of the head.")
@click.option(
    "--moments",
    type=click.Choice([moments.value for moments in MomentFormat]),
    help="How it keeps experts' moments (default: as STORE does).",
)
@json_option
def reshard(
    store: Path,
    target: Path,
    ranks: int | None,
    expert: int,
    tensor: int,
    stages: int,
    stage_blocks: str | None,
    embedding: str | None,
    head: str | None,
    moments: str | None,
    output: Output,
) -> None:
    """Make of STORE one for another layout of ranks, dense parameters cut anew and experts moved, or one that keeps
    experts' moments in another format. STORE stays as it is.
    """
    from tierstore.hf.spec import stored_spec
    from tierstore.parallel import ParallelConfig
    from tierstore.parallel.layout import layout_of
    from tierstore.train.resharding import VocabularyPlacement
    from tierstore.train.resharding import reshard as make

    if ranks is None and moments is None and embedding is None and head is None:
        raise click.UsageError("expected --ranks, --moments, --embedding or --head")
    _check_ranks(ranks, expert, tensor, stages, stage_blocks)
    blocks = _numbers(stage_blocks)
    wanted = ParallelConfig(expert=expert, tensor=tensor, stages=stages, stage_blocks=blocks)
    start = time.monotonic()
    with output.progress(0, label="reshard") as progress:
        done = make(
            store,
            target,
            None if ranks is None else layout_of(wanted, ranks),
            lambda written, total: progress.update(written, total, {}),
            placement=VocabularyPlacement(
                None if embedding is None else RowPlacement(embedding),
                None if head is None else RowPlacement(head),
            ),
            moments=None if moments is None else MomentFormat(moments),
            model=stored_spec(store),
            stage_blocks=blocks,
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{target}: step {done.step}, {done.before} to {done.after}, moments {done.moments.value}; wrote {done.records} "
        f"records, {format_bytes(done.nbytes)} in {format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": str(target),
            "step": done.step,
            **_named(done.after),
            **{f"{name}_before": count for name, count in _named(done.before).items()},
            "moments": done.moments.value,
            "records": done.records,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
        }
    )


def _check_ranks(ranks: int | None, expert: int, tensor: int, stages: int, stage_blocks: str | None) -> None:
    """Raises UsageError."""
    if ranks is None and (expert, tensor, stages) != (0, 1, 1):
        raise click.UsageError("--expert, --tensor and --stages need --ranks")
    if stage_blocks is not None and stages == 1:
        raise click.UsageError("--stage-blocks needs --stages")
    if ranks is not None and ranks < 1:
        raise click.UsageError(f"--ranks: expected at least 1, got {ranks}")


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(
            f"--stage-blocks: expected numbers with commas between them, got {text!r}"
        ) from error


def _named(layout: Layout) -> dict[str, int]:
    return {
        "ranks": layout.world,
        "expert_ranks": layout.expert,
        "tensor_ranks": layout.tensor,
        "stages": layout.stages,
    }
