"""``tierstore import`` and ``export``: convert Hugging Face checkpoints to stores and back."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import EXISTING_DIRECTORY, PATH, dataclass_options, json_option
from tierstore.cli.output import Output
from tierstore.config import PathKind, option
from tierstore.errors import ConfigError
from tierstore.machine import MemoryAccount
from tierstore.machine_profile import check_process_memory
from tierstore.model.config import ComputeDtype
from tierstore.parallel.config import ParallelConfig
from tierstore.quant.layout import CodeFormat
from tierstore.store.format import MomentFormat
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # these import torch, which --help must not load
    from tierstore.hf.adapters import ExportedAdapter
    from tierstore.hf.exporting import Exported
    from tierstore.hf.importing import ImportPlan, ImportReport


@dataclass(frozen=True, kw_only=True)
class _Import:
    """How to import a checkpoint."""

    store: Path = option(help="Directory of the new store; the same command resumes.")
    compute: ComputeDtype | None = option(
        None, "Compute type (default: fp32 for an fp32 checkpoint, else bf16)."
    )
    frozen: bool = option(False, "Import read-only experts without moments: for LoRA, serving.")
    moments: MomentFormat = option(
        MomentFormat.FP32,
        "Format of experts' moments; runs must set the same adamw.moments.",
    )
    codes: CodeFormat | None = option(
        None,
        "With --frozen: quantise experts, for forward passes only (default: the compute type).",
        "--weights",
    )
    memory: int = option(0, "Memory of the process (default: what the import needs).", size=True, typed="0")
    host_budget: int = option(64 << 20, "Memory for experts while they are copied.", size=True)
    expert_ranks: int = option(0, "Ranks that share a copy of the experts (0: all).")


@click.command("import")
@click.argument("model", type=EXISTING_DIRECTORY, metavar="MODEL_DIR")
@dataclass_options(_Import, "asked")
@json_option
def import_(model: Path, asked: _Import, output: Output) -> None:
    """Import the safetensors checkpoint in MODEL_DIR into a store. Under torchrun each rank imports its own part."""
    check_process_memory(asked.memory)
    output = output.of_first_rank()
    with output.passing("import") as progress:
        from tierstore.hf.importing import ImportOptions, import_model
        from tierstore.hf.manifest import Weights
        from tierstore.parallel import launch

        options = ImportOptions(
            compute=asked.compute,
            weights=Weights.FROZEN if asked.frozen else Weights.TRAINABLE,
            moments=asked.moments,
            codes=asked.codes,
            host_budget=asked.host_budget,
            memory=asked.memory,
        )
        with launch(ParallelConfig(expert=asked.expert_ranks), device="cpu") as mesh:
            report = import_model(
                model,
                asked.store,
                options,
                mesh=mesh,
                planned=lambda plan, account: _describe(plan, account, asked.store, output),
                progress=progress,
            )
    _show_import(report, asked.store, output)


def _describe(plan: ImportPlan, account: MemoryAccount, store: Path, output: Output) -> None:
    manifest = plan.manifest
    experts = manifest.experts
    output.line(
        f"model: {manifest.architecture}, {manifest.total_parameters / 1e6:.1f} M parameters; {experts.records} experts in "
        f"{len(experts.layers)} layers, {experts.numel} parameters each; computes in {manifest.compute.value}"
    )
    if manifest.quantization.value != "none":
        output.line(
            f"the checkpoint is quantised ({manifest.quantization.value}); the store keeps and exports it as bf16"
        )
    if manifest.carried:
        output.line(
            f"{len(manifest.carried)} tensors unused by this family ({manifest.carried[0].name}, ...) are kept unchanged"
        )
    for note in plan.notes:
        output.line(note)
    output.announce(account)
    each = " for each rank" if plan.state.ranks > 1 else ""
    frozen = manifest.weights.value == "frozen"
    if manifest.codes is not None:
        output.line(f"experts are quantised to {manifest.codes.value}, for forward passes only")
    more = "read-only weights" if frozen else "moments start at zero and are not written"
    output.line(
        f"disk: {format_bytes(plan.disk_bytes)}{each} reserved in {store}; {format_bytes(plan.source_bytes)} to read; {more}"
    )


def _show_import(report: ImportReport, store: Path, output: Output) -> None:
    manifest = report.manifest
    skipped = f" ({report.skipped} imported earlier)" if report.skipped else ""
    output.line(
        f"{store}: {report.records} records imported{skipped} in {format_seconds(report.elapsed_s)}; read "
        f"{format_bytes(report.read_bytes)}, wrote {format_bytes(report.written_bytes)}"
    )
    held = output.compare(report.account)
    if report.direct_reason:
        output.line(f"the checkpoint was read through the page cache: {report.direct_reason}")
    output.emit(
        {
            "store": store,
            "model_type": manifest.model_type,
            "architecture": manifest.architecture,
            "compute": manifest.compute,
            "weights": manifest.weights,
            "codes": manifest.codes,
            "quantization": manifest.quantization,
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
            **held,
            "moving_s": report.moving_s,
            "elapsed_s": report.elapsed_s,
        }
    )


@dataclass(frozen=True, kw_only=True)
class _Export:
    """What to write."""

    target: Path = option(MISSING, "Directory to create.", "--to")
    dtype: str | None = option(
        None,
        "Type of the weights (default: the imported checkpoint's; bf16 if it was quantised).",
        choices=("bf16", "fp32"),
    )
    max_shard_size: int | None = option(None, "Largest file (default: 5GB).", size=True)
    adapter: bool = option(False, "Write only the LoRA pairs, as a peft adapter.")
    merge: Path | None = option(
        None,
        "Merge this peft adapter into the weights.",
        path=PathKind.EXISTING_DIRECTORY,
        click={"metavar": "ADAPTER"},
    )


@click.command()
@click.argument("store", type=PATH)
@dataclass_options(_Export, "asked")
@json_option
def export(store: Path, asked: _Export, output: Output) -> None:
    """Write the model in STORE (all ranks, at the last commit) as safetensors.

    An imported model keeps its tensor names; the built-in model is written as a Mixtral if its options allow it. LoRA pairs
    of train --lora are merged into the weights; --adapter writes them alone.
    """
    if asked.adapter and any(each is not None for each in (asked.dtype, asked.merge, asked.max_shard_size)):
        raise ConfigError("--adapter cannot be combined with --dtype, --merge or --max-shard-size")
    start = time.monotonic()
    with output.passing("export") as progress:
        from tierstore.hf.adapters import export_adapter, load_adapter
        from tierstore.hf.exporting import export as write
        from tierstore.hf.writing import MAX_SHARD_BYTES, ExportDtype

        if asked.adapter:
            written = export_adapter(store, asked.target, progress=progress)
            _show_adapter(written, store, asked.target, time.monotonic() - start, output)
            return
        done = write(
            store,
            asked.target,
            dtype=None if asked.dtype is None else ExportDtype(asked.dtype),
            max_shard_bytes=MAX_SHARD_BYTES if asked.max_shard_size is None else asked.max_shard_size,
            adjustment=None if asked.merge is None else load_adapter(asked.merge, store),
            announced=output.announce,
            progress=progress,
        )
    _show_export(done, store, asked.target, time.monotonic() - start, output)


def _show_export(done: Exported, store: Path, target: Path, elapsed_s: float, output: Output) -> None:
    for note in done.notes:
        output.line(note)
    ranks = f", {done.ranks} ranks" if done.ranks > 1 else ""
    output.line(
        f"{target}: {done.model_type} at step {done.step}{ranks}; wrote {done.tensors} tensors as {done.dtype.value}, "
        f"{format_bytes(done.nbytes)} in {done.shards} file{'s' * (done.shards > 1)} in {format_seconds(elapsed_s)}"
    )
    held = output.compare(done.account)
    output.emit(
        {
            "store": store,
            "model_directory": target,
            "model_type": done.model_type,
            "dtype": done.dtype,
            "step": done.step,
            "ranks": done.ranks,
            "tensors": done.tensors,
            "files": done.shards,
            "experts": done.experts,
            "written_bytes": done.nbytes,
            **held,
            "elapsed_s": elapsed_s,
            "written_bytes_per_s": done.nbytes / elapsed_s,
            "notes": done.notes,
        }
    )


def _show_adapter(done: ExportedAdapter, store: Path, target: Path, elapsed_s: float, output: Output) -> None:
    output.line(
        f"{target}: an adapter at step {done.step}; wrote {done.tensors} tensors as fp32, {format_bytes(done.nbytes)} in "
        f"{format_seconds(elapsed_s)}"
    )
    output.emit(
        {
            "store": store,
            "adapter_directory": target,
            "step": done.step,
            "tensors": done.tensors,
            "written_bytes": done.nbytes,
            "elapsed_s": elapsed_s,
        }
    )
