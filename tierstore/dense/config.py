"""Configuration of dense slices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierstore.config import check_least, key


class OptimizerState(StrEnum):
    """Where a rank's slices (fp32 weights and moments) are kept and stepped: on the device, in host memory, or in host
    memory with moments on disk.
    """

    DEVICE = "device"
    HOST = "host"  # the device holds gathered parameters only
    NVME = "nvme"  # as HOST, with moments in the store's records: those of two parameter groups in memory at a time


class GatherDtype(StrEnum):
    """The type in which ranks send weights that the model casts to its compute type. The same bits either way."""

    COMPUTE = "compute"
    FP32 = "fp32"


class Fusion(StrEnum):
    """The content of one message."""

    UNIT = "unit"  # the slices of a parameter group, gathered at once; gradients in buckets
    PARAMETER = "parameter"  # one parameter, gathered and reduced alone: the baseline for fusion


class Reshard(StrEnum):
    """The time at which gathered parameters are released."""

    AFTER_FORWARD = "after-forward"  # and gathered again for the backward pass
    AFTER_BACKWARD = "after-backward"  # one gather a micro-batch; all parameter groups are held at once


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Settings for slicing, gathering and reducing dense parameters. They change memory and time, never results."""

    optimizer_state: OptimizerState = key(
        OptimizerState.DEVICE, "location of slices and their optimizer steps"
    )
    gather: GatherDtype = key(GatherDtype.COMPUTE, "type in which matrices are gathered")
    fusion: Fusion = key(Fusion.UNIT, "content of a message: a parameter group or one parameter")
    reshard: Reshard = key(Reshard.AFTER_FORWARD, "when gathered parameters are released")
    buffers: int = key(3, "most blocks gathered at once (after-backward: all)")
    bucket_bytes: int = key(32 << 20, "gradients reduced in one message (at most a block's)", size=True)
    gradient_buffers: int = key(2, "blocks whose gradients are computed or reduced at once")

    def __post_init__(self) -> None:
        check_least(self, 1, "buffers", "gradient_buffers", table="dense.")
        check_least(self, 0, "bucket_bytes", table="dense.")
