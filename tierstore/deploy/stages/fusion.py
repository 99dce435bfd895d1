"""Stage 1: the records and slices of all ranks, and the pairs of an adapter, become one logical model.

The weights leave the training store as an export does it: ranks put together, missed steps replayed, low-rank pairs
merged. They come back as a frozen store of one rank. Moments, spare slots for copy on write, and the copies of
replicas stay behind. A built-in model leaves as the Mixtral that it is, and is one from here on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from tierstore.deploy.checking import bytes_on_disk, store_checks, verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.errors import StoreMissingError
from tierstore.hf.exports.exporting import export
from tierstore.hf.exports.outline import ExportDtype
from tierstore.hf.imports.importing import ImportOptions, import_model
from tierstore.hf.manifest import MANIFEST_NAME, Manifest, Weights
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.quant.layout import CodeFormat
from tierstore.store.disk.home import IDENTITY, MODEL_DIRECTORY, rank_directories
from tierstore.store.reading import OpenAt, read_states
from tierstore.units import format_bytes

_STORE, _CHECKPOINT = "store", "checkpoint"


class FusionStage:
    """See the module."""

    name = StageName.FUSION

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        """The store as it is: another commit of it is another model."""
        dtype = _export_dtype(config)
        return {"source": source_fingerprint(config.store), "dtype": None if dtype is None else dtype.value}

    def run(self, context: StageContext) -> StageOutput:
        config, store = context.config, context.directory / _STORE
        checkpoint = context.directory / _CHECKPOINT
        before = bytes_on_disk(config.store)
        notes: tuple[str, ...] = ()
        if not checkpoint.exists():
            done = export(config.store, checkpoint, dtype=_export_dtype(config))
            notes = done.notes
            context.check()
        refrozen(checkpoint, store, context, codes=_codes_of(config))
        shutil.rmtree(checkpoint)
        manifest = Manifest.read(store)
        after = bytes_on_disk(store)
        context.say(
            f"fusion: {manifest.model_type}, {manifest.experts.records} experts; {format_bytes(before)} on disk before, "
            f"{format_bytes(after)} after"
        )
        return StageOutput(
            store=store,
            checks=store_checks(store),
            figures={
                "source_ranks": len(rank_directories(config.store)) or 1,
                "bytes_before": before,
                "bytes_after": after,
                "expert_parameters": manifest.expert_parameters,
                "total_parameters": manifest.total_parameters,
            },
            notes=notes,
        )

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)


def refrozen(
    checkpoint: Path, store: Path, context: StageContext, *, codes: CodeFormat | None = None
) -> None:
    """Imports ``checkpoint`` frozen to ``store``, or goes on with it; asked to stop, it does after the next record.

    ``codes``: how its experts are quantised; None where they are not.
    """
    import_model(
        checkpoint,
        store,
        ImportOptions(weights=Weights.FROZEN, codes=codes, commit_bytes=256 << 20),
        progress=lambda done, total, fields: context.check(),
    )


def source_fingerprint(store: Path) -> str:
    """Tells a job's stores at their last commits from all others. Raises StoreMissingError, StoreFormatError."""
    directories = rank_directories(store) or [store]
    digest = hashlib.sha256()
    for directory in directories:
        identity = directory / IDENTITY
        if not identity.exists():
            raise StoreMissingError(f"{directory}: no store here")
        digest.update(identity.read_bytes())
        state = read_states(directory, STATE_KEY).get(OpenAt.LAST)
        position = -1
        if state is not None:
            position = TrainState.unpack({STATE_KEY: state}, where=str(directory)).position
        digest.update(f"step {position}".encode())
    return digest.hexdigest()[:32]


def _codes_of(config: DeployConfig) -> CodeFormat | None:
    """Experts that came quantised stay so, unless other weights are asked for."""
    if config.compression.weights is not None or not _imported(config.store):
        return None
    return Manifest.read(config.store).codes


def _export_dtype(config: DeployConfig) -> ExportDtype | None:
    """The type that was asked for, or that products have; None for a built-in model, whose export knows it."""
    weights = config.compression.weights
    if weights is not None and not weights.quantized:
        return ExportDtype(weights.value)
    if not _imported(config.store):
        return None
    narrow = Manifest.read(config.store).compute is ComputeDtype.BF16
    return ExportDtype.BF16 if narrow else ExportDtype.FP32


def _imported(store: Path) -> bool:
    return (store / MODEL_DIRECTORY / MANIFEST_NAME).exists()
