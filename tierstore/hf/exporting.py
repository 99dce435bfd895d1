"""``tierstore export``: the model of a store as a checkpoint that transformers and others load.

Tensor after tensor goes from the records to its place in the files, so memory holds a dense unit, some buffers, and the
experts that are read ahead, whatever the size of the model. The store is not changed, except for a commit that was never
acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError, StoreFormatError
from tierstore.hf.adapters import StoredAdapter
from tierstore.hf.checkpoint import TensorInfo, TensorReader, TensorSpec, read_header
from tierstore.hf.families import FAMILIES
from tierstore.hf.manifest import MANIFEST_NAME, Manifest, ParameterEntry, Quantization
from tierstore.hf.mixtral import mixtral
from tierstore.hf.spec import recorded_lora
from tierstore.hf.stored_weights import Adjustment, ExpertRequest, ModelWeights, open_weights
from tierstore.hf.weights import round_bf16, widen_bf16
from tierstore.hf.writing import (
    MAX_SHARD_BYTES,
    Bytes,
    DenseValues,
    ExpertValues,
    ExportDtype,
    Origin,
    Outline,
    Shard,
    json_bytes,
    plan_shards,
    write_model,
)
from tierstore.machine import MemoryAccount, resident_bytes
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import (
    BUFFERS_KEY,
    reading_conditions,
    recorded_model,
    table_of,
    unpack_arrays,
)
from tierstore.stats import OnProgress, no_progress
from tierstore.store.disk.home import MODEL_DIRECTORY
from tierstore.train.stored_model import stored_fusion
from tierstore.train.vocabulary import places_of, recorded_placements

_CHUNK_VALUES = 4 << 20
_MOST_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Exported:
    """Summary of an export: ``step``, the training step; ``nbytes``, the bytes of values; ``account``, what the process was
    to hold; ``notes``, lines for the user.
    """

    model_type: str
    dtype: ExportDtype
    step: int
    ranks: int
    tensors: int
    shards: int
    experts: int
    nbytes: int
    account: MemoryAccount
    notes: tuple[str, ...]


def export(
    source: Path,
    target: Path,
    *,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    adjustment: Adjustment | None = None,
    announced: Callable[[MemoryAccount], None] = lambda account: None,
    progress: OnProgress = no_progress,
) -> Exported:
    """Writes the model of the store in ``source`` to the directory ``target``.

    ``dtype`` None: the type of the source checkpoint (bf16 if it was quantised), or the built-in model's compute type.
    ``adjustment`` changes the exported weights; None merges the pairs that a LoRA run has trained. ``announced`` receives
    what the process will hold, ``progress`` the bytes of values written so far and the total. Raises StoreError,
    ConfigError (a built-in model that is no Mixtral), ChecksumError, OSError (a target that exists, a full disk); after a
    failure nothing exists at ``target``.
    """
    imported = (source / MODEL_DIRECTORY / MANIFEST_NAME).exists()
    manifest = Manifest.read(source) if imported else None
    process = resident_bytes()
    with open_weights(source) as weights:
        account = weights.account(process)
        announced(account)
        ranks = weights.data_ranks
        if manifest is not None:
            outline = outline_of(source, manifest, ranks, dtype)
        else:
            state, where = weights.state, str(source)
            model, fusion = recorded_model(state, where=where), stored_fusion(state, where=where)
            with reading_conditions(where):
                tables = places_of(model, recorded_placements(table_of(state.conditions["parallel"])))
            outline = mixtral(model, fusion, ranks, dtype, tables)
        if recorded_lora(source, weights.state).enabled:
            if adjustment is not None:
                raise ConfigError(
                    f"{source}: an adapter was trained in this store, so no other adapter can be merged"
                )
            adjustment = StoredAdapter(source, weights)
            note = "the LoRA pairs are merged into the weights"
            outline = replace(outline, notes=(*outline.notes, note))
        elif adjustment is not None and weights.state.position:
            note = f"the adapter is merged into weights that have taken {weights.state.position} steps since the import"
            outline = replace(outline, notes=(*outline.notes, note))
        shards = write_outline(
            outline,
            weights,
            target,
            adjustment=adjustment,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
        experts = {
            (origin.layer, expert)
            for _, origin in outline.tensors
            if isinstance(origin, ExpertValues)
            for expert in origin.experts
        }
        return Exported(
            model_type="mixtral" if manifest is None else manifest.model_type,
            dtype=outline.dtype,
            step=weights.state.position,
            ranks=len(weights.stores),
            tensors=len(outline.tensors),
            shards=len(shards),
            experts=len(experts),
            nbytes=sum(shard.data_bytes for shard in shards),
            account=account,
            notes=outline.notes,
        )


def write_outline(
    outline: Outline,
    weights: ModelWeights,
    target: Path,
    *,
    adjustment: Adjustment | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: OnProgress = no_progress,
) -> list[Shard]:
    """Writes the checkpoint of ``outline`` to the new directory ``target``, with the values of ``weights``; its files.

    Raises ChecksumError, StoreFormatError, OSError (a target that exists, a full disk); after a failure nothing exists at
    ``target``.
    """
    shards = plan_shards([spec for spec, _ in outline.tensors], max_shard_bytes)
    with TensorReader() as reader:
        content = _Content(weights, outline, adjustment, reader)
        content.expect(tensor for shard in shards for tensor in shard.tensors)
        write_model(target, shards, outline.files, content.of, progress)
    return shards


# Imported models --------------------------------------------------------------------------------------------


def outline_of(source: Path, manifest: Manifest, ranks: int, dtype: ExportDtype | None) -> Outline:
    """The export of an imported model: the tensors of its source checkpoint, under their names there.

    Raises StoreFormatError, OSError.
    """
    was = manifest.experts.source_dtype
    if dtype is None:
        dtype = ExportDtype.FP32 if was == "F32" else ExportDtype.BF16
    directory = source / MODEL_DIRECTORY
    files = {name: (directory / name).read_bytes() for name in manifest.files}
    notes = []
    if manifest.quantization is not Quantization.NONE:
        notes.append(
            f"the model came as {'FP8' if manifest.quantization is Quantization.FP8_BLOCKS else 'MXFP4'} and leaves as "
            f"{dtype.value}; quantization_config is removed from config.json"
        )
    elif was == "F16":
        notes.append(f"the model came as fp16 and leaves as {dtype.value}")
    if "config.json" in files:
        files["config.json"] = config_with(files["config.json"], dtype, where=str(directory / "config.json"))
    return Outline(
        dtype=dtype,
        tensors=list(_tensors(directory, manifest, dtype)),
        layouts=manifest.unit_layouts(ranks),
        files=files,
        notes=tuple(notes),
    )


def config_with(content: bytes, dtype: ExportDtype, *, where: str = "config.json") -> bytes:
    """config.json for unquantised weights of ``dtype``; byte for byte the source's if nothing changes.

    Raises StoreFormatError.
    """
    try:
        config = json.loads(content)
        before = dict(config)
    except (TypeError, ValueError) as error:
        raise StoreFormatError(f"{where}: not a configuration: {error}") from error
    config.pop("quantization_config", None)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config.update(dict.fromkeys(named, dtype.torch_name))
    return content if config == before else json_bytes(config)


def _tensors(directory: Path, manifest: Manifest, dtype: ExportDtype) -> Iterator[tuple[TensorSpec, Origin]]:
    dense: dict[str, tuple[str, DenseValues]] = {}
    shapes = {entry.name: entry.shape for entry in manifest.parameters()}
    for number, unit in enumerate(manifest.units):
        for index, entry in enumerate(unit.parameters):
            values = DenseValues(entry.name, number, index, 0, entry.numel)
            dense[entry.name] = _dtype(manifest, entry, dtype), values
            yield TensorSpec(entry.source, dense[entry.name][0], entry.shape), values
        layer = number - 1
        if layer in manifest.experts.layers:
            yield from _experts(manifest, layer, dtype)
    for tied in manifest.tied:
        if tied.stored:
            kind, values = dense[tied.of]
            yield TensorSpec(tied.source, kind, shapes[tied.of]), values
    for buffer in manifest.buffers:
        # Buffers keep their source type unless it is narrower than the requested type.
        narrow = buffer.source_dtype in ("F16", "BF16")
        kind = dtype.safetensors if narrow else buffer.source_dtype
        yield TensorSpec(buffer.source, kind, buffer.shape), buffer
    headers: dict[str, dict[str, TensorInfo]] = {}
    for carried in manifest.carried:
        if carried.file not in headers:
            headers[carried.file] = read_header(directory / carried.file)
        info = headers[carried.file].get(carried.name)
        if info is None:
            raise StoreFormatError(f"{directory / carried.file}: tensor {carried.name!r} is missing")
        yield info, info


def _experts(manifest: Manifest, layer: int, dtype: ExportDtype) -> Iterator[tuple[TensorSpec, Origin]]:
    family, experts = FAMILIES[manifest.model_type], manifest.experts
    others = dict(experts.other_dtypes)
    for expert in range(experts.count):
        for part in family.expert_parts(layer, expert, experts):
            if part.index is None:
                of, shape = range(expert, expert + 1), part.shape
            elif expert == 0:  # the tensor has all experts of the layer
                of, shape = range(experts.count), (experts.count, *part.shape)
            else:
                continue
            kept_wide = others.get(part.source) == "F32"  # fp32 biases among matrices in bf16
            kind = "F32" if kept_wide else dtype.safetensors
            yield TensorSpec(part.source, kind, shape), ExpertValues(layer, of, part.offset, part.numel)


def _dtype(manifest: Manifest, entry: ParameterEntry, dtype: ExportDtype) -> str:
    """The type in which a dense parameter is exported: one that the checkpoint kept wider than its weights stays wider."""
    if dtype is ExportDtype.BF16 and entry.source_dtype == "F32":
        wide = manifest.compute is ComputeDtype.BF16 and entry.dtype == "float32"
        if wide or manifest.experts.source_dtype != "F32":
            return "F32"
    return dtype.safetensors


# Values -----------------------------------------------------------------------------------------------------


class _Content:
    """The bytes of each tensor; those of carried tensors come through ``reader``."""

    def __init__(
        self, weights: ModelWeights, outline: Outline, adjustment: Adjustment | None, reader: TensorReader
    ) -> None:
        self._weights, self._outline, self._adjustment, self._reader = weights, outline, adjustment, reader
        self._origins = {spec.name: origin for spec, origin in outline.tensors}
        #: Small tensors of all experts, by layer and type; and their collected values, by name.
        self._small: dict[tuple[int, str], list[tuple[str, ExpertValues]]] = {}
        self._kept: dict[str, list[Bytes]] = {}
        for spec, origin in outline.tensors:
            if not isinstance(origin, ExpertValues) or len(origin.experts) == 1:
                continue
            if spec.nbytes <= _MOST_KEPT_BYTES:
                self._small.setdefault((origin.layer, spec.dtype), []).append((spec.name, origin))
        self._expert: tuple[tuple[int, int, str], npt.NDArray[np.generic]] | None = None
        self._buffers: dict[str, npt.NDArray[np.generic]] = {}
        if BUFFERS_KEY in weights.small:
            self._buffers = unpack_arrays(weights.small[BUFFERS_KEY], where="the buffers of the last commit")

    def expect(self, tensors: Iterable[TensorSpec]) -> None:
        """``of`` will be called with ``tensors``, in this order: their experts are read ahead."""
        order: list[tuple[int, int, str]] = []
        kept: set[str] = set()
        for tensor in tensors:
            origin = self._origins[tensor.name]
            if not isinstance(origin, ExpertValues) or tensor.name in kept:
                continue
            if len(origin.experts) > 1:
                kept.update(name for name, _ in self._small.get((origin.layer, tensor.dtype), ()))
            order += [(origin.layer, expert, tensor.dtype) for expert in origin.experts]
        masters = self._adjustment is not None
        self._weights.expect(
            [
                ExpertRequest(layer, expert, masters or dtype == "F32")
                for (layer, expert, dtype), _ in groupby(order)
            ]
        )

    def of(self, tensor: TensorSpec) -> Iterator[Bytes]:
        """The values of ``tensor``, in pieces. Raises ChecksumError, StoreFormatError, OSError."""
        match self._origins[tensor.name]:
            case DenseValues() as origin:
                yield from self._dense(tensor, origin)
            case ExpertValues() as origin:
                yield from self._experts(tensor, origin)
            case ParameterEntry(name):
                yield self._buffer(tensor, name)
            case TensorInfo() as info:
                yield from self._reader.chunks(info)

    def _experts(self, tensor: TensorSpec, origin: ExpertValues) -> Iterator[Bytes]:
        """Where tensors hold all experts of a layer, each takes a pass over their records: the first one of a type collects
        what the small ones (biases) will need.
        """
        kept = self._kept.pop(tensor.name, None)
        if kept is not None:
            yield from kept
            return
        small = self._small.pop((origin.layer, tensor.dtype), []) if len(origin.experts) > 1 else []
        for expert in origin.experts:
            whole = self._whole(origin.layer, expert, tensor.dtype)
            for name, other in small:
                if name == tensor.name:
                    continue
                part = whole[other.begin : other.begin + other.numel]
                self._kept.setdefault(name, []).append(_bytes(part.copy()))
            yield _bytes(whole[origin.begin : origin.begin + origin.numel])

    def _dense(self, tensor: TensorSpec, origin: DenseValues) -> Iterator[Bytes]:
        pieces = self._weights.dense(self._outline.layouts[origin.unit], origin.index)
        if self._adjustment is not None:
            whole = np.concatenate(list(pieces))
            self._adjustment.dense(origin.name, whole)
            pieces = iter([whole])
        at = 0
        for piece in pieces:
            low, high = max(origin.begin - at, 0), min(origin.begin + origin.numel - at, piece.size)
            at += piece.size
            for begin in range(low, high, _CHUNK_VALUES):
                values = piece[begin : min(begin + _CHUNK_VALUES, high)]
                if origin.scale != 1.0:
                    values = values * np.float32(origin.scale)
                yield _bytes(values if tensor.dtype == "F32" else round_bf16(values))

    def _whole(self, layer: int, expert: int, dtype: str) -> npt.NDArray[np.generic]:
        """All weights of an expert in ``dtype``, flat; the last one is kept."""
        if self._expert is not None and self._expert[0] == (layer, expert, dtype):
            return self._expert[1]
        self._expert = None
        whole: npt.NDArray[np.generic]
        if self._adjustment is not None:
            masters = self._weights.expert_fp32(layer, expert).copy()
            self._adjustment.expert(layer, expert, masters)
            whole = masters if dtype == "F32" else round_bf16(masters)
        elif dtype == "F32":
            whole = self._weights.expert_fp32(layer, expert)
        else:
            whole = self._weights.expert_bf16(layer, expert)
        self._expert = ((layer, expert, dtype), whole)
        return whole

    def _buffer(self, tensor: TensorSpec, name: str) -> Bytes:
        values = self._buffers.get(name)
        if values is None:
            raise StoreFormatError(f"the last commit has no buffer {name!r}")
        if values.size != tensor.numel:
            raise StoreFormatError(f"buffer {name!r}: {values.shape}, expected {tensor.shape}")
        if tensor.dtype not in ("F32", "BF16"):
            return _bytes(values.reshape(-1))
        flat = values.reshape(-1)
        wide = (
            widen_bf16(flat.view(np.uint16))
            if flat.dtype == np.uint16
            else np.ascontiguousarray(flat, np.float32)
        )
        return _bytes(wide if tensor.dtype == "F32" else round_bf16(wide))


def _bytes(values: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)
