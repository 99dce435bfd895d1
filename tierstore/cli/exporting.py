"""``tierstore export``: the model of a store as a checkpoint of Hugging Face transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import EXISTING_DIRECTORY, PATH, SIZE, json_option
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # at run time it imports torch, which listing the commands must not
    from tierstore.hf.exporting import Exported


@click.command()
@click.argument("store", type=PATH)
@click.option("--to", "target", type=PATH, required=True, help="The new model directory; must not exist.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    help="Type of the weights (default: that of the checkpoint they came from, bf16 where it was quantised).",
)
@click.option("--max-shard-size", type=SIZE, help="Bytes of the largest file (default: 5GB).")
@click.option(
    "--adapter", is_flag=True, help="The low-rank pairs that train --lora has made alone, as peft loads them."
)
@click.option(
    "--merge", type=EXISTING_DIRECTORY, metavar="ADAPTER", help="Merge an adapter of peft's into the weights."
)
@json_option
def export(
    store: Path,
    target: Path,
    dtype: str | None,
    max_shard_size: int | None,
    adapter: bool,
    merge: Path | None,
    output: Output,
) -> None:
    """Write the model of STORE, of all ranks if it has several, as it is after its last commit. STORE stays as it is.

    An imported model leaves under the names that it came with, the built-in one as a Mixtral, where its options allow it.
    Pairs of train --lora are merged into its weights, if --adapter does not ask for them alone.
    """
    if adapter:
        if any(option is not None for option in (dtype, merge, max_shard_size)):
            raise ConfigError(
                "--adapter: expected neither --dtype nor --merge nor --max-shard-size: pairs leave as they are, in fp32 and "
                "one file"
            )
        _write_adapter(store, target, output)
        return
    from tierstore.hf.adapters import load_adapter
    from tierstore.hf.exporting import export as write
    from tierstore.hf.writing import MAX_SHARD_BYTES, ExportDtype

    start = time.monotonic()
    with output.progress(0, label="export (MiB)") as progress:
        done = write(
            store,
            target,
            dtype=None if dtype is None else ExportDtype(dtype),
            max_shard_bytes=MAX_SHARD_BYTES if max_shard_size is None else max_shard_size,
            adjustment=None if merge is None else load_adapter(merge, store),
            progress=lambda written, total: progress.update(written >> 20, total >> 20, {}),
        )
    _show(done, store, target, time.monotonic() - start, output)


def _show(done: Exported, store: Path, target: Path, elapsed_s: float, output: Output) -> None:
    for note in done.notes:
        output.line(note)
    ranks = f", {done.ranks} ranks" if done.ranks > 1 else ""
    output.line(
        f"{target}: {done.model_type} at step {done.step}{ranks}; wrote {done.tensors} tensors as {done.dtype.value}, "
        f"{format_bytes(done.nbytes)} in {done.shards} file{'s' * (done.shards > 1)} in {format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": str(store),
            "model_directory": str(target),
            "model_type": done.model_type,
            "dtype": done.dtype.value,
            "step": done.step,
            "ranks": done.ranks,
            "tensors": done.tensors,
            "files": done.shards,
            "experts": done.experts,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
            "written_bytes_per_s": done.nbytes / elapsed_s,
            "notes": list(done.notes),
        }
    )


def _write_adapter(store: Path, target: Path, output: Output) -> None:
    from tierstore.hf.adapters import export_adapter

    start = time.monotonic()
    with output.progress(0, label="export (MiB)") as progress:
        done = export_adapter(
            store, target, progress=lambda written, total: progress.update(written >> 20, total >> 20, {})
        )
    elapsed_s = time.monotonic() - start
    output.line(
        f"{target}: an adapter at step {done.step}; wrote {done.tensors} tensors as fp32, {format_bytes(done.nbytes)} in "
        f"{format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": str(store),
            "adapter_directory": str(target),
            "step": done.step,
            "tensors": done.tensors,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
        }
    )
