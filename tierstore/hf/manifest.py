"""The description of an imported store's model: ``STORE/model/manifest.json``.

The import writes it; training, planning and exports read it. Imports neither torch nor transformers.
Names of parameters are those in memory (``model.layers.3.self_attn.q_proj.weight``); each entry has the name on disk
too. An expert has one record (its order of values: ``ExpertEntry``); a dense unit has one slice a rank.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tierstore.dense.config import Fusion
from tierstore.dense.layout import Narrow, UnitLayout, layouts_of_shapes
from tierstore.errors import StoreFormatError, StoreMissingError
from tierstore.model.config import ComputeDtype
from tierstore.quant.layout import CodeFormat
from tierstore.store.disk.home import MODEL_DIRECTORY, write_durably
from tierstore.store.format import MomentFormat

MANIFEST_VERSION = 1
#: The manifest's file name in a job's ``MODEL_DIRECTORY``.
MANIFEST_NAME = "manifest.json"


class ExpertLayout(StrEnum):
    """The order of one expert's values in its record (F: the expert's width, D: the model's)."""

    #: ``[gate F x D | up F x D | down D x F]``.
    CONCATENATED = "concatenated"
    #: ``[gate_up D x 2F, gate and up interleaved | its bias 2F | down F x D | its bias D]``.
    INTERLEAVED_BIASED = "interleaved-biased"


class Quantization(StrEnum):
    """The quantisation of the source's weights; a store holds them dequantised."""

    NONE = "none"
    FP8_BLOCKS = "fp8-blocks"  # F8_E4M3 with one scale for each block of 128 x 128 (DeepSeek-V3)
    MXFP4 = "mxfp4"  # 32 values of 4 bits share one power of two (gpt-oss)


class Weights(StrEnum):
    """Whether the experts can be trained."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"  # records of weights alone, read only


@dataclass(frozen=True)
class ParameterEntry:
    """A dense parameter, or a persistent buffer (``e_score_correction_bias``). ``dtype``: torch's name for its type in
    memory. ``source``: its name on disk, and ``source_dtype`` its type there, by safetensors' name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    source_dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitEntry:
    """Dense parameters that are needed together, in the order in which they lie in the unit's slices."""

    name: str
    parameters: tuple[ParameterEntry, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class TiedEntry:
    """Parameter ``name`` is parameter ``of``. ``stored``: whether the source had it under its own name ``source`` too."""

    name: str
    of: str
    source: str
    stored: bool


@dataclass(frozen=True)
class ExpertEntry:
    """The experts: ``count`` in each of ``layers``, of width ``d_ff``. ``activation``: its name in transformers.

    ``source_dtype`` is the type on disk of most of their tensors; ``other_dtypes``: (tensor, type) of the rest.
    """

    layers: tuple[int, ...]
    count: int
    top_k: int
    d_model: int
    d_ff: int
    layout: ExpertLayout
    activation: str
    source_dtype: str
    other_dtypes: tuple[tuple[str, str], ...] = ()

    @property
    def numel(self) -> int:
        """Weights of one expert."""
        biases = 2 * self.d_ff + self.d_model if self.layout is ExpertLayout.INTERLEAVED_BIASED else 0
        return 3 * self.d_ff * self.d_model + biases

    @property
    def records(self) -> int:
        return self.count * len(self.layers)


@dataclass(frozen=True)
class CarriedEntry:
    """A tensor that the family ignores, kept unchanged in ``file`` beside the manifest."""

    name: str
    file: str


@dataclass(frozen=True)
class Manifest:
    """A model as its store holds it. ``fingerprint`` identifies its source. ``codes``: the quantisation of frozen experts'
    weights; None without one.
    """

    model_type: str
    architecture: str
    compute: ComputeDtype
    weights: Weights
    fusion: Fusion
    quantization: Quantization
    vocab_size: int
    d_model: int
    layers: int
    experts: ExpertEntry
    units: tuple[UnitEntry, ...]
    buffers: tuple[ParameterEntry, ...] = ()
    tied: tuple[TiedEntry, ...] = ()
    carried: tuple[CarriedEntry, ...] = ()
    files: tuple[str, ...] = ()  # configuration and tokenizer files beside the manifest
    source: str = ""
    fingerprint: str = ""
    version: int = MANIFEST_VERSION
    codes: CodeFormat | None = None

    # Sizes --------------------------------------------------------------------------------------------------

    @property
    def dense_parameters(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def expert_parameters(self) -> int:
        return self.experts.numel * self.experts.records

    @property
    def total_parameters(self) -> int:
        """All parameters; a tied one counts once, buffers do not."""
        return self.dense_parameters + self.expert_parameters

    # Layout -------------------------------------------------------------------------------------------------

    def narrow(self, parameter: ParameterEntry) -> Narrow:
        """Whether a pass needs ``parameter`` only in the compute type."""
        cast = self.compute is ComputeDtype.BF16 and parameter.dtype == "bfloat16"
        return Narrow.YES if cast else Narrow.NO

    def unit_layouts(self, ranks: int) -> list[UnitLayout]:
        """How the dense units are cut for ``ranks`` ranks."""
        units = [(unit.name, [(self.narrow(p), p.shape) for p in unit.parameters]) for unit in self.units]
        return layouts_of_shapes(units, ranks=ranks, fusion=self.fusion)

    def parameters(self) -> Iterator[ParameterEntry]:
        """The dense parameters, in the order of their units."""
        for unit in self.units:
            yield from unit.parameters

    # JSON ---------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        return _without_later(self)

    def write(self, directory: Path) -> None:
        """Writes and fsyncs ``MANIFEST_NAME`` in ``directory``; the caller fsyncs the directory."""
        write_durably(directory / MANIFEST_NAME, (json.dumps(self.as_json(), indent=1) + "\n").encode())

    @classmethod
    def read(cls, store: Path) -> Manifest:
        """The manifest of the job in ``store``. Raises StoreMissingError, and StoreFormatError naming what is wrong."""
        path = store / MODEL_DIRECTORY / MANIFEST_NAME
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreMissingError(f"{path}: missing; {store} holds no imported model") from error
        except ValueError as error:
            raise StoreFormatError(f"{path}: not JSON: {error}") from error
        found = value.get("version") if isinstance(value, Mapping) else MANIFEST_VERSION
        if found != MANIFEST_VERSION:
            raise StoreFormatError(f"{path}: version {found!r}, expected {MANIFEST_VERSION}")
        try:
            manifest: Manifest = from_json(cls, value, MANIFEST_NAME)
            return manifest
        except (TypeError, ValueError) as error:
            raise StoreFormatError(f"{path}: not a manifest: {error}") from error


#: Keys that are omitted at their default, the meaning that manifests had before these keys existed.
_LATER = {"codes", "moments"}
_hints = functools.cache(get_type_hints)


def _without_later(record: Manifest | ImportState) -> dict[str, Any]:
    fields = record.__dataclass_fields__
    return {
        key: value
        for key, value in asdict(record).items()
        if key not in _LATER or value != fields[key].default
    }


def from_json(kind: Any, value: Any, name: str) -> Any:
    """Converts ``value``, the JSON value of the key ``name``, to the annotated type ``kind``.

    Raises TypeError or ValueError if it does not fit.
    """
    if isinstance(kind, UnionType):  # a type or None
        return None if value is None else from_json(get_args(kind)[0], value, name)
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(from_json(each, item, name) for each, item in zip(kinds, value, strict=True))
    if get_origin(kind) is Mapping and isinstance(value, dict):
        key, each = get_args(kind)
        return {key(name): from_json(each, item, name) for name, item in value.items()}
    made: Any = kind  # mypy cannot call what is_dataclass has narrowed
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = _hints(made)
        if missing := sorted(hints.keys() - value.keys() - _LATER):
            raise TypeError(f"{name}: {missing[0]} is missing")
        return made(**{key: from_json(hints.get(key, object), item, key) for key, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if not (isinstance(kind, type) and isinstance(value, kind)):
        raise TypeError(f"{name}: unexpected value {value!r:.80}")
    return value


# Small state ------------------------------------------------------------------------------------------------


class ImportProgress(StrEnum):
    """The progress of an import."""

    PARTIAL = "partial"
    COMPLETE = "complete"


@dataclass(frozen=True)
class ImportState:
    """The state that each commit of an import has under ``IMPORT_KEY``: the source, the layout, and the progress.

    The store of a ``PARTIAL`` import lacks some of its records: only the same import may resume it.
    """

    progress: ImportProgress
    fingerprint: str
    compute: ComputeDtype
    weights: Weights
    ranks: int
    expert_ranks: int
    rank: int
    version: int = MANIFEST_VERSION
    moments: MomentFormat = MomentFormat.FP32
    codes: CodeFormat | None = None

    def pack(self) -> bytes:
        return json.dumps(_without_later(self), sort_keys=True, default=lambda enum: enum.value).encode()

    @classmethod
    def unpack(cls, data: bytes, *, where: str) -> ImportState:
        """Raises StoreFormatError naming ``where``."""
        try:
            state: ImportState = from_json(cls, json.loads(data), "import")
            return state
        except (TypeError, ValueError) as error:
            raise StoreFormatError(f"{where}: the state of the import is damaged: {error}") from error
