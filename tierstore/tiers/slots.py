"""The kind of device, and the sizes of the device tier's slots. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from tierstore.quant.layout import QuantizedLayout

_PAGE = 4096


class DeviceKind(Enum):
    """The kind of a device: the CPU, or one with its own memory."""

    CPU = "cpu"
    CUDA = "cuda"

    @classmethod
    def of(cls, device_type: str) -> DeviceKind:
        """The kind of a ``torch.device.type``: anything but the CPU is sized like CUDA."""
        return cls.CPU if device_type == "cpu" else cls.CUDA


class SlotGradient(Enum):
    """What a gradient slot holds."""

    #: A sum over micro-batches or replicas, in fp32.
    SUM = "sum"
    #: One matrix product, in the compute type, which holds all of its digits.
    PRODUCT = "product"


class ElementType(Protocol):
    """A torch.dtype, or anything else with an element size."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        ...


E = TypeVar("E", bound=ElementType)
F = TypeVar("F", bound=ElementType)


@dataclass(frozen=True)
class DeviceSlots(Generic[E]):
    """Number and size of the slots. Each holds ``numel`` elements: weights in the compute type, or as codes if
    ``quantized``; gradients in fp32, or in the compute type if ``gradient`` is a product. ``spare``: host buffers for
    gradients whose steps may wait until their experts are used again, beside one for each gradient slot.
    """

    numel: int
    compute: E
    weights: int = 4
    gradients: int = 3
    quantized: QuantizedLayout | None = None
    gradient: SlotGradient = SlotGradient.SUM
    spare: int = 0

    def computing(self, compute: F) -> DeviceSlots[F]:
        """The same slots with another description of the compute type, such as torch's."""
        return DeviceSlots(**{**vars(self), "compute": compute})

    @property
    def weight_content_bytes(self) -> int:
        """Bytes of the weights in a slot."""
        return self.numel * self.compute.itemsize if self.quantized is None else self.quantized.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight slot."""
        return _padded(self.weight_content_bytes)

    @property
    def gradient_content_bytes(self) -> int:
        """Bytes of the gradient in a slot."""
        return self.numel * (4 if self.gradient is SlotGradient.SUM else self.compute.itemsize)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient slot, and of the host buffer that a gradient is copied to."""
        return _padded(self.gradient_content_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.weights * self.weight_bytes + self.gradients * self.gradient_bytes

    @property
    def host_buffers(self) -> int:
        """The number of host buffers that a device's gradients are copied to."""
        return self.gradients + self.spare

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers."""
        return self.host_buffers * self.gradient_bytes


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
