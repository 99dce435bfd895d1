"""Stages 1, 4 and 6: fusion, segmentation and deployment; and the checks of a store that another stage wrote.

**Fusion**: the records and slices of all ranks, and the pairs of an adapter, become one logical model. The weights are
exported from the training store: ranks are combined, missed steps replayed, low-rank pairs merged. The export is imported
as a frozen store of one rank, without moments, spare slots for copy on write, and copies of replicas. A built-in model is
exported as a Mixtral and remains one from here on.

**Segmentation**: divides the model to fit the memory. Its blocks form the fewest segments that fit the memory one at a time,
balanced by bytes, or the segments given. All dense parameters, and as many experts as the remaining memory holds, stay
resident; if that is not the whole model, the tiers load one segment after another.

**Deployment**: the directory that is served. Its files are hard links to those of earlier stages, so that it takes no space
and the stages stay complete until it has its final name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.deploy.records import DeployConfig, StageContext, StageOutput
from tierstore.errors import BudgetError, ChecksumError, ConfigError, StoreFormatError, StoreMissingError
from tierstore.hf.exporting import Exported, export
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Manifest, Weights
from tierstore.hf.spec import HfSpec, imported_spec, stored_spec
from tierstore.hf.writing import ExportDtype
from tierstore.machine import bytes_on_disk, memory
from tierstore.model.store_schema import STATE_KEY, TrainState, expert_weight_bytes
from tierstore.quant.layout import CodeFormat
from tierstore.stats import OnProgress, in_parts, no_progress
from tierstore.store.disk.home import IDENTITY, fsync_directory, rank_directories
from tierstore.store.parameter_store import open_to_read
from tierstore.store.reading import OpenAt, read_states
from tierstore.units import format_bytes


def store_checks(store: Path, progress: OnProgress = no_progress) -> dict[str, object]:
    """Counts, shapes and checksums over all records of the frozen store at ``store``, of one rank or several.

    Reads and verifies every record. Raises ChecksumError, StoreFormatError, OSError.
    """
    manifest = Manifest.read(store)
    if manifest.weights is not Weights.FROZEN:
        raise StoreFormatError(
            f"{store}: expected a frozen store (weights only), found {manifest.weights.value}"
        )
    directories = rank_directories(store) or [store]
    records, sums = 0, []
    for directory, part in zip(directories, in_parts(progress, len(directories)), strict=True):
        with open_to_read(directory) as opened:
            records += len(opened.keys)
            sums.append(f"{opened.records_crc32c(part):08x}")
    units = sum(1 for layout in manifest.unit_layouts(len(directories)) if not layout.empty)
    expected = manifest.experts.records + units * len(directories)
    if records != expected:
        raise StoreFormatError(f"{store}: {records} records, expected {expected}")
    return {
        "records": records,
        "crc32c": sums,
        "experts_per_layer": manifest.experts.count,
        "expert_values": manifest.experts.numel,
        "moe_layers": len(manifest.experts.layers),
        "dense_values": manifest.dense_parameters,
    }


def verify_checks(store: Path, wanted: Mapping[str, object], progress: OnProgress = no_progress) -> None:
    """Compares ``store_checks`` with the recorded ones. Raises ChecksumError naming the first difference."""
    found = store_checks(store, progress)
    for name, value in wanted.items():
        if name in found and found[name] != value:
            raise ChecksumError(
                f"{store}: {name}: expected {value}, as its stage recorded, found {found[name]}"
            )


_STORE, _CHECKPOINT = "store", "checkpoint"


def fusion_settings(config: DeployConfig) -> Mapping[str, object]:
    """Identifies the store at its last commit: each commit is another model."""
    dtype = _export_dtype(config)
    return {"source": source_fingerprint(config.store), "dtype": None if dtype is None else dtype.value}


def fuse(context: StageContext) -> StageOutput:
    config, store = context.config, context.directory / _STORE
    checkpoint = context.directory / _CHECKPOINT
    before = bytes_on_disk(config.store)
    notes: tuple[str, ...] = ()
    if not checkpoint.exists():
        notes = exported(config.store, checkpoint, context, _export_dtype(config)).notes
    # Experts are quantised as in the source, unless other weights are requested.
    spec = None if config.compression.weights is not None else stored_spec(config.store)
    imported(checkpoint, store, context, codes=None if spec is None else spec.expert_codes)
    checks = checked(store, context)
    shutil.rmtree(checkpoint)
    manifest = Manifest.read(store)
    after = bytes_on_disk(store)
    context.say(
        f"fusion: {manifest.model_type}, {manifest.experts.records} experts; {format_bytes(before)} on disk before, "
        f"{format_bytes(after)} after"
    )
    return StageOutput(
        store=store,
        checks=checks,
        figures={
            "source_ranks": len(rank_directories(config.store)) or 1,
            "bytes_before": before,
            "bytes_after": after,
            "expert_parameters": manifest.expert_parameters,
            "total_parameters": manifest.total_parameters,
        },
        notes=notes,
    )


def exported(store: Path, checkpoint: Path, context: StageContext, dtype: ExportDtype | None) -> Exported:
    """Exports ``store`` to ``checkpoint``, in the type ``dtype`` (None: the export determines it)."""
    with context.passing("export") as progress:
        return export(store, checkpoint, dtype=dtype, announced=context.announced, progress=progress)


def imported(
    checkpoint: Path,
    store: Path,
    context: StageContext,
    *,
    weights: Weights = Weights.FROZEN,
    codes: CodeFormat | None = None,
) -> None:
    """Imports ``checkpoint`` into ``store``, or resumes the import, with commits every 256 MiB: a request to stop waits for
    the next record. ``codes``: the quantisation of frozen experts; None for none.
    """
    with context.passing("import") as progress:
        import_model(
            checkpoint,
            store,
            ImportOptions(weights=weights, codes=codes, commit_bytes=256 << 20),
            planned=lambda plan, account: context.announced(account),
            progress=progress,
        )


def checked(store: Path, context: StageContext) -> dict[str, object]:
    """``store_checks``, with progress."""
    with context.passing("checksum") as progress:
        return store_checks(store, progress)


def source_fingerprint(store: Path) -> str:
    """Identifies a job's stores at their last commits. Raises StoreMissingError, StoreFormatError."""
    directories = rank_directories(store) or [store]
    digest = hashlib.sha256()
    for directory in directories:
        identity = directory / IDENTITY
        if not identity.exists():
            raise StoreMissingError(f"{directory}: no store found")
        digest.update(identity.read_bytes())
        state = read_states(directory, STATE_KEY).get(OpenAt.LAST)
        position = -1
        if state is not None:
            position = TrainState.unpack({STATE_KEY: state}, where=str(directory)).position
        digest.update(f"step {position}".encode())
    return digest.hexdigest()[:32]


def _export_dtype(config: DeployConfig) -> ExportDtype | None:
    """The requested type, or the compute type; None for a built-in model, whose export determines it."""
    weights = config.compression.weights
    if weights is not None and not weights.quantized:
        return ExportDtype(weights.value)
    return None if stored_spec(config.store) is None else product_dtype(config.store)


def product_dtype(store: Path) -> ExportDtype:
    """The type in which the model of ``store`` computes."""
    return ExportDtype(Manifest.read(store).compute.value)


#: Memory of one decoder block, in bytes: dense parameters, and experts.
BlockBytes = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """Blocks ``first`` to ``last``, and their memory in bytes."""

    first: int
    last: int
    dense: int
    experts: int


def block_bytes(spec: HfSpec) -> list[BlockBytes]:
    """Memory of each decoder block; the embedding counts with the first, the head with the last."""
    compute = spec.compute_dtype.itemsize
    embedding, *blocks, head = [compute * unit.matrices + 4 * unit.others for unit in spec.architecture.units]
    blocks[0] += embedding
    blocks[-1] += head
    experts = spec.experts * expert_weight_bytes(spec)
    return [(each, experts * (layer in spec.moe_layers)) for layer, each in enumerate(blocks)]


def balanced(sizes: Sequence[int], count: int) -> list[int]:
    """The first block of each of ``count`` segments, so that the largest is as small as possible; of equals, the first cut.

    Raises ConfigError for more segments than blocks.
    """
    total = len(sizes)
    if not 1 <= count <= total:
        raise ConfigError(f"segments: expected 1 to {total}, one for each block at most, got {count}")
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # least[n]: the largest segment of the best cut of the first n blocks, so far into as many segments as rounds.
    least = [float(end) for end in ends]
    cuts = [[0] * (total + 1)]
    for _ in range(count - 1):
        best, cut = [float("inf")] * (total + 1), [0] * (total + 1)
        for n in range(1, total + 1):
            for k in range(1, n):
                worst = max(least[k], float(ends[n] - ends[k]))
                if worst < best[n]:
                    best[n], cut[n] = worst, k
        least = best
        cuts.append(cut)
    firsts, n = [], total
    for cut in reversed(cuts):
        n = cut[n]
        firsts.append(n)
    return firsts[::-1]


def fewest(sizes: Sequence[int], memory: int) -> int:
    """The fewest segments that each fit ``memory``. Raises BudgetError for a block that does not fit."""
    if max(sizes) > memory:
        raise BudgetError(
            f"--memory: {format_bytes(memory)} are too little for one block; the minimum is {max(sizes)} bytes "
            f"({format_bytes(max(sizes))})"
        )
    count, filled = 1, 0
    for size in sizes:
        if filled + size > memory:
            count, filled = count + 1, 0
        filled += size
    return count


def cut(blocks: Sequence[BlockBytes], firsts: Sequence[int]) -> list[Segment]:
    """The segments that begin with the blocks ``firsts``. Raises ConfigError for a block that does not exist."""
    if list(firsts) != sorted(set(firsts)) or not firsts or firsts[0] != 0 or firsts[-1] >= len(blocks):
        raise ConfigError(
            f"--segments: expected first blocks ascending from 0, below {len(blocks)}, got {tuple(firsts)}"
        )
    ends = [*firsts[1:], len(blocks)]
    return [
        Segment(first, end - 1, *map(sum, zip(*blocks[first:end], strict=True)))
        for first, end in zip(firsts, ends, strict=True)
    ]


def check_ranks(ranks: int, experts: int) -> None:
    """Raises ConfigError for more ``ranks`` than ``experts`` in a layer."""
    if ranks > experts:
        raise ConfigError(f"--ranks: expected at most {experts}, one for each expert of a layer, got {ranks}")


#: The part of memory that a server uses for weights; the rest is for keys and values, activations and the interpreter.
_SERVED_PART = 0.75


def segmentation_settings(config: DeployConfig) -> Mapping[str, object]:
    placement = config.placement
    return {"memory": placement.memory, "ranks": placement.ranks, "segments": list(placement.segments)}


def segment(context: StageContext) -> StageOutput:
    placement, spec = context.config.placement, imported_spec(context.input_store)
    ranks = placement.ranks
    check_ranks(ranks, spec.experts)
    # Bytes of one rank: each has the whole dense parameters, and its part of a layer's experts.
    blocks = [(dense, -(-experts // ranks)) for dense, experts in block_bytes(spec)]
    sizes = [sum(block) for block in blocks]
    available = placement.memory if placement.memory is not None else memory().usable_bytes // ranks
    given = int(available * _SERVED_PART)
    firsts = list(placement.segments) or balanced(sizes, min(fewest(sizes, given), len(sizes)))
    segments = cut(blocks, firsts)
    dense, experts = map(sum, zip(*blocks, strict=True))
    least = spec.top_k * expert_weight_bytes(spec)
    host_budget = min(given - dense, experts)
    if host_budget < least:
        raise BudgetError(
            f"--memory: {format_bytes(available)} leave too little beside {format_bytes(dense)} of dense parameters; "
            f"the minimum is {int((dense + least) / _SERVED_PART) + 1} bytes"
        )
    for segment in segments:
        context.say(
            f"segmentation: blocks {segment.first} to {segment.last}: {format_bytes(segment.dense)} dense, "
            f"{format_bytes(segment.experts)} of experts"
        )
    return StageOutput(
        figures={
            "ranks": ranks,
            "kind": "pipeline of one rank" if ranks == 1 else f"experts over {ranks} ranks",
            "segments": [asdict(segment) for segment in segments],
            "memory": available,
            "dense_bytes": dense,
            "expert_bytes": experts,
            "host_budget": host_budget,
            "resident_fraction": host_budget / experts,
        },
    )


def assemble(context: StageContext) -> StageOutput:
    before, store = context.before[-1], context.directory / "store"
    if store.exists():
        shutil.rmtree(store)
    link_tree(context.input_store, store)
    with context.passing("checksum") as progress:
        verify_checks(store, before.checks, progress)
    profile = before.figures.get("profile")  # the optimisation's measurements of the settings that it chose
    figures = {"bytes_on_disk": bytes_on_disk(store), **(profile if isinstance(profile, dict) else {})}
    return StageOutput(store=store, checks=before.checks, figures=figures)


def link_tree(source: Path, target: Path) -> None:
    """Makes ``target`` with hard links to the files of ``source``, durably. Raises OSError."""
    target.mkdir()
    for child in sorted(source.iterdir()):
        if child.is_dir():
            link_tree(child, target / child.name)
        else:
            os.link(child, target / child.name)
    fsync_directory(target)
