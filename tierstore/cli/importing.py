"""``tierstore import``: a checkpoint of Hugging Face transformers becomes a store that can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import EXISTING_DIRECTORY, PATH, SIZE, json_option
from tierstore.cli.output import Output, OutputMode
from tierstore.model.config import ComputeDtype
from tierstore.quant.layout import CodeFormat
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.hf.importing import ImportPlan, ImportReport


@click.command("import")
@click.argument("model", type=EXISTING_DIRECTORY, metavar="MODEL_DIR")
@click.option(
    "--store", type=PATH, required=True, help="Directory of the store; an import that was cut short goes on."
)
@click.option(
    "--compute",
    type=click.Choice([dtype.value for dtype in ComputeDtype]),
    help="Type in which the model will compute (default: fp32 for a checkpoint in fp32, else bf16).",
)
@click.option("--frozen", is_flag=True, help="Experts as weights alone, read only: for LoRA.")
@click.option(
    "--moments",
    type=click.Choice([moments.value for moments in MomentFormat]),
    default=MomentFormat.FP32.value,
    help="How experts' moments are kept (adamw.moments of the runs to come).",
)
@click.option(
    "--weights",
    "codes",
    type=click.Choice([codes.value for codes in CodeFormat]),
    help="With --frozen: experts as 8 or 4 bits a weight with fp32 scales, to serve (default: the compute type).",
)
@click.option("--host-budget", type=SIZE, default="64MiB", help="Memory for experts on their way.")
@click.option(
    "--expert-ranks", type=int, default=0, help="Ranks that share one copy of the experts (0: all of them)."
)
@json_option
def import_(
    model: Path,
    store: Path,
    compute: str | None,
    frozen: bool,
    moments: str,
    codes: str | None,
    host_budget: int,
    expert_ranks: int,
    output: Output,
) -> None:
    """Make a store of the safetensors in MODEL_DIR. Under torchrun, each rank imports its own part."""
    from tierstore.hf.importing import ImportOptions, import_model
    from tierstore.hf.manifest import Weights
    from tierstore.parallel import launch
    from tierstore.parallel.config import ParallelConfig

    options = ImportOptions(
        compute=None if compute is None else ComputeDtype(compute),
        weights=Weights.FROZEN if frozen else Weights.TRAINABLE,
        moments=MomentFormat(moments),
        codes=None if codes is None else CodeFormat(codes),
        host_budget=host_budget,
    )
    with launch(ParallelConfig(expert=expert_ranks), device="cpu") as mesh:
        if mesh.world.rank:
            output = Output(OutputMode.SILENT)
        with output.progress(0, label="import") as progress:
            report = import_model(
                model,
                store,
                options,
                mesh=mesh,
                planned=lambda plan: _describe(plan, store, output),
                progress=progress.update,
            )
        _show(report, store, output)


def _describe(plan: ImportPlan, store: Path, output: Output) -> None:
    manifest = plan.manifest
    experts = manifest.experts
    output.line(
        f"model: {manifest.architecture}, {manifest.total_parameters / 1e6:.1f} M parameters; {experts.records} experts in "
        f"{len(experts.layers)} layers, {experts.numel} parameters each; computes in {manifest.compute.value}"
    )
    if manifest.quantization.value != "none":
        output.line(
            f"the checkpoint is quantised ({manifest.quantization.value}); it is stored, and exported, as bf16"
        )
    if manifest.carried:
        output.line(
            f"{len(manifest.carried)} tensors that this family ignores ({manifest.carried[0].name}, ...) are carried along"
        )
    for note in plan.notes:
        output.line(note)
    each = " for each rank" if plan.ranks > 1 else ""
    frozen = manifest.weights.value == "frozen"
    if manifest.codes is not None:
        output.line(f"experts are kept in {manifest.codes.value}, for forward passes alone")
    more = "weights alone, read only" if frozen else "moments begin as zeros that are not written"
    output.line(
        f"disk: {format_bytes(plan.disk_bytes)}{each} reserved in {store}; {format_bytes(plan.source_bytes)} to read; {more}"
    )


def _show(report: ImportReport, store: Path, output: Output) -> None:
    manifest = report.manifest
    skipped = f" ({report.skipped} were there already)" if report.skipped else ""
    output.line(
        f"{store}: {report.records} records imported{skipped} in {format_seconds(report.elapsed_s)}; read "
        f"{format_bytes(report.read_bytes)}, wrote {format_bytes(report.written_bytes)}"
    )
    if report.direct_reason:
        output.line(f"the checkpoint was read through the page cache: {report.direct_reason}")
    output.emit(
        {
            "store": str(store),
            "model_type": manifest.model_type,
            "architecture": manifest.architecture,
            "compute": manifest.compute.value,
            "weights": manifest.weights.value,
            "codes": None if manifest.codes is None else manifest.codes.value,
            "quantization": manifest.quantization.value,
            "total_parameters": manifest.total_parameters,
            "expert_parameters": manifest.expert_parameters,
            "experts": manifest.experts.records,
            "carried_tensors": len(manifest.carried),
            "records": report.records,
            "skipped_records": report.skipped,
            "read_bytes": report.read_bytes,
            "written_bytes": report.written_bytes,
            "reserved_bytes": report.reserved_bytes,
            "commits": report.commits,
            "moving_s": report.moving_s,
            "elapsed_s": report.elapsed_s,
        }
    )
