"""The names in a model's store: keys and schemas of the experts' records, and the named states of a commit.

Import, training, resharding, export and serving all use these names. Dense records are named by
``tierstore.dense.slices``. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.config import from_dict
from tierstore.errors import StoreFormatError
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.model.spec import ModelSpec
from tierstore.quant.layout import QuantizedLayout
from tierstore.store.format import MomentFormat, RecordSchema, Training, WeightFormat

T = TypeVar("T")

#: Schemas of experts, and of low-rank pairs trained beside frozen experts.
EXPERT_SCHEMA = "expert"
PAIR_SCHEMA = "lora"
#: States: the progress of training, and that of an import. Until an import is complete there is no STATE_KEY.
STATE_KEY = "train"
IMPORT_KEY = "import"


def expert_key(layer: int, expert: int) -> str:
    """The record key of an expert: key order is layer order, then expert order."""
    return f"expert.{layer:04d}.{expert:05d}"


def pair_key(layer: int, expert: int) -> str:
    """The record key of an expert's low-rank pairs."""
    return f"lora.{layer:04d}.{expert:05d}"


def expert_record(
    numel: int,
    compute: ComputeDtype,
    training: Training = Training.TRAINED,
    moments: MomentFormat = MomentFormat.FP32,
    *,
    quantized: QuantizedLayout | None = None,
) -> RecordSchema:
    """The schema of experts of ``numel`` parameters that compute in ``compute``; ``moments`` are those of trained experts.
    ``quantized``: the layout of quantised weights of frozen experts.
    """
    if quantized is not None:
        kept = WeightFormat(quantized.codes.value)
    elif compute is not ComputeDtype.BF16:
        kept = WeightFormat.FP32
    else:
        kept = WeightFormat.BF16 if training is Training.FROZEN else WeightFormat.SPLIT_BF16
    moments = MomentFormat.FP32 if training is Training.FROZEN else moments
    return RecordSchema(EXPERT_SCHEMA, numel, kept, training=training, moments=moments, quantized=quantized)


def quantized_layout(model: ModelSpec) -> QuantizedLayout | None:
    """The layout of quantised expert weights, otherwise None."""
    return None if model.expert_codes is None else model.expert_shape.quantized(model.expert_codes)


def expert_weight_bytes(model: ModelSpec) -> int:
    """Bytes that a forward pass reads of one expert's weights."""
    layout = quantized_layout(model)
    return model.expert_shape.numel * model.compute_dtype.itemsize if layout is None else layout.nbytes


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The progress of a task, of this run or an earlier one. ``position``: examples taken; ``tokens``: counted targets
    trained on; ``head`` is the value of a ``tierstore.train.tasks.TaskHead``.
    """

    position: int = 0
    tokens: int = 0
    head: str = "shared"
    train_loss: float | None = None
    val_loss: float | None = None


@dataclass
class TrainState:
    """The state of training under ``STATE_KEY``.

    ``position``: steps taken from the data, skipped ones included; ``skipped``: the non-finite ones among them. ``begun``
    is False after an import, until a first run. ``job``: the elastic job of ``torchrun`` that writes the store.
    ``conditions``: the settings that the bits of the run depend on (``tierstore.train.state.conditions``).
    """

    position: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    #: The numbers of chunks of forward and backward passes over experts, if the run chooses them.
    chunks: list[int] | None = None
    begun: bool = True
    job: str = ""
    conditions: dict[str, object] = field(default_factory=dict)
    #: All tasks ever trained in this store.
    tasks: dict[str, TaskProgress] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks that the store was made for; 0 if not recorded."""
        parallel = self.conditions.get("parallel")
        count = parallel.get("ranks") if isinstance(parallel, dict) else None
        return count if isinstance(count, int) else 0

    def pack(self) -> bytes:
        values = asdict(self)
        if not self.tasks:  # older stores have no such entries
            del values["tasks"]
        if not self.job:
            del values["job"]
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def unpack(cls, state: Mapping[str, bytes], *, where: str) -> TrainState:
        """The inverse of ``pack``. Raises StoreFormatError naming ``where`` if training did not make the store."""
        if STATE_KEY not in state:
            if IMPORT_KEY in state:
                raise StoreFormatError(
                    f"{where}: the import was cut short; run the same tierstore import again to continue"
                )
            raise StoreFormatError(
                f"{where}: the store holds no training state, so there is nothing to resume"
            )
        try:
            values = json.loads(state[STATE_KEY])
            tasks = {name: TaskProgress(**known) for name, known in values.pop("tasks", {}).items()}
            return cls(**values, tasks=tasks)
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{where}: the training state is damaged: {error}") from error


def table_of(value: object) -> dict[str, object]:
    """``value``, checked to be a table of settings."""
    assert isinstance(value, dict)
    return value


@contextlib.contextmanager
def reading_conditions(where: str) -> Iterator[None]:
    """Reads the conditions of the store at ``where``. Raises StoreFormatError for a missing or unsuitable value."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StoreFormatError(f"{where}: the conditions of the run are damaged: {error}") from error


def from_conditions(cls: type[T], table: object, *, where: str) -> T:
    """A ``cls`` from its settings in the conditions of the store at ``where``. Raises StoreFormatError."""
    with reading_conditions(where):
        return from_dict(cls, table_of(table), origin=where)


def recorded_model(state: TrainState, *, where: str) -> ModelConfig:
    """The built-in model recorded in the store at ``where``. Raises StoreFormatError."""
    return from_conditions(ModelConfig, state.conditions.get("model"), where=where)


# Buffers ----------------------------------------------------------------------------------------------------


#: The name of the model's buffers in a commit.
BUFFERS_KEY = "buffers"


def pack_arrays(arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Packs small named arrays for a commit's state: the length of a JSON header, the header, then the values."""
    header = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    head = json.dumps(header).encode()
    values = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return struct.pack("<Q", len(head)) + head + values


def unpack_arrays(data: bytes, *, where: str) -> dict[str, npt.NDArray[np.generic]]:
    """The inverse of ``pack_arrays``. Raises StoreFormatError naming ``where``."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    try:
        (length,) = struct.unpack_from("<Q", data)
        offset = 8 + length
        for name, (dtype, shape) in json.loads(data[8:offset]).items():
            count = math.prod(shape)
            array = np.frombuffer(data, np.dtype(dtype), count, offset)
            arrays[name] = array.reshape(shape).copy()
            offset += array.nbytes
    except (struct.error, TypeError, ValueError) as error:
        raise StoreFormatError(f"{where}: damaged arrays: {error}") from error
    return arrays


def with_all_buffers(states: Sequence[Mapping[str, bytes]], *, where: str) -> dict[str, bytes]:
    """The first of ``states``, the small states of commits of pipeline stages, with the buffers of all stages. Shared
    buffers must be equal. Raises StoreFormatError naming ``where``.
    """
    packed = [state[BUFFERS_KEY] for state in states if BUFFERS_KEY in state]
    if len(states) == 1 or not packed:
        return dict(states[0])
    found: dict[str, npt.NDArray[np.generic]] = {}
    for data in packed:
        for name, array in unpack_arrays(data, where=where).items():
            if not np.array_equal(found.setdefault(name, array), array):
                raise StoreFormatError(f"{where}: {name}: two pipeline stages have different values of it")
    return {**states[0], BUFFERS_KEY: pack_arrays(found)}
