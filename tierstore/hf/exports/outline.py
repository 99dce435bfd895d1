"""What an export will hold, before anything is written: each tensor, and where its values come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierstore.dense import UnitLayout
from tierstore.hf.checkpoints.checkpoint import TensorInfo
from tierstore.hf.checkpoints.writing import TensorSpec


class ExportDtype(StrEnum):
    """The type in which weights leave."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def safetensors(self) -> str:
        """safetensors' name of it."""
        return "BF16" if self is ExportDtype.BF16 else "F32"

    @property
    def torch_name(self) -> str:
        return "bfloat16" if self is ExportDtype.BF16 else "float32"


@dataclass(frozen=True)
class DenseValues:
    """``numel`` values from ``begin`` of parameter ``index`` of dense unit ``unit``, ``name`` in memory, times ``scale``."""

    name: str
    unit: int
    index: int
    begin: int
    numel: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertValues:
    """``numel`` values from ``begin`` of each of ``experts``, one after another."""

    layer: int
    experts: range
    begin: int
    numel: int


@dataclass(frozen=True)
class BufferValues:
    """Buffer ``name`` in memory, which the commit's small state has."""

    name: str


@dataclass(frozen=True)
class CarriedValues:
    """A tensor of another file, as it is."""

    info: TensorInfo


Origin = DenseValues | ExpertValues | BufferValues | CarriedValues


@dataclass(frozen=True)
class Outline:
    """A checkpoint to be: ``tensors`` in order, by name, with their origins; small ``files`` beside them; what a user must
    be told (``notes``). ``layouts``: how the dense units lie in the stores. ``experts``: of each layer.
    """

    dtype: ExportDtype
    tensors: Sequence[tuple[TensorSpec, Origin]]
    layouts: Sequence[UnitLayout]
    experts: int
    files: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
