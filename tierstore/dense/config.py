"""Configuration of dense slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tierstore.errors import ConfigError


class OptimizerState(StrEnum):
    """Where a rank's slices live, fp32 weights and moments, and are stepped: in host memory unless on the device."""

    DEVICE = "device"
    HOST = "host"  # the device holds gathered parameters only
    NVME = "nvme"  # as HOST, with moments in the store's records: two units of them in memory at a time


class GatherDtype(StrEnum):
    """In which type weights travel that the model casts to its compute type. The same bits either way."""

    COMPUTE = "compute"
    FP32 = "fp32"


class Fusion(StrEnum):
    """What one message carries."""

    UNIT = "unit"  # the slices of a unit's parameters, gathered at once; gradients in buckets
    PARAMETER = "parameter"  # one parameter, gathered and reduced alone: what fusion is measured against


class Reshard(StrEnum):
    """When gathered parameters are released."""

    AFTER_FORWARD = "after-forward"  # and gathered again for the backward pass
    AFTER_BACKWARD = "after-backward"  # one gather a micro-batch; every unit is held at once


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """How dense parameters are sliced, gathered and reduced. Changes memory and time, never what is computed."""

    optimizer_state: OptimizerState = field(
        default=OptimizerState.DEVICE, metadata={"help": "where slices live and are stepped"}
    )
    gather: GatherDtype = field(
        default=GatherDtype.COMPUTE, metadata={"help": "type in which matrices are gathered"}
    )
    fusion: Fusion = field(default=Fusion.UNIT, metadata={"help": "what one message carries"})
    reshard: Reshard = field(
        default=Reshard.AFTER_FORWARD, metadata={"help": "when gathered parameters are let go"}
    )
    buffers: int = field(
        default=3, metadata={"help": "fusion buffers: blocks gathered at once (after-backward: all blocks)"}
    )
    bucket_bytes: int = field(
        default=32 << 20,
        metadata={"size": True, "help": "gradients reduced in one message (at most a block's)"},
    )
    gradient_buffers: int = field(
        default=2, metadata={"help": "blocks whose gradients are made or reduced at once"}
    )

    def __post_init__(self) -> None:
        for name in ("buffers", "gradient_buffers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"dense.{name}: expected at least 1, got {getattr(self, name)}")
        if self.bucket_bytes < 0:
            raise ConfigError(f"dense.bucket_bytes: expected at least 0, got {self.bucket_bytes}")
