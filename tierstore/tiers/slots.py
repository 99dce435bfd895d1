"""The kind of device, and the sizes of the device tier's slots. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from tierstore.quant.layout import QuantizedLayout

_PAGE = 4096


class DeviceKind(Enum):
    """Whether the device has memory of its own."""

    CPU = "cpu"
    CUDA = "cuda"

    @classmethod
    def of(cls, device_type: str) -> DeviceKind:
        """The kind of a ``torch.device.type``: whatever is not the CPU is sized as CUDA is."""
        return cls.CPU if device_type == "cpu" else cls.CUDA


class ElementType(Protocol):
    """A torch.dtype, or whatever else knows the size of its elements."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        ...


E = TypeVar("E", bound=ElementType)


@dataclass(frozen=True)
class DeviceSlots(Generic[E]):
    """How many slots of ``numel`` elements: weights in the compute type, or as codes where they are ``quantized``;
    gradients in fp32.
    """

    numel: int
    compute: E
    weights: int = 4
    gradients: int = 3
    quantized: QuantizedLayout | None = None

    @property
    def weight_content_bytes(self) -> int:
        """Bytes of the weights in a slot."""
        return self.numel * self.compute.itemsize if self.quantized is None else self.quantized.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight slot."""
        return _padded(self.weight_content_bytes)

    @property
    def gradient_bytes(self) -> int:
        return _padded(self.numel * 4)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.weights * self.weight_bytes + self.gradients * self.gradient_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers, one for each gradient slot, that gradients leave a device for."""
        return self.gradients * self.gradient_bytes


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
