"""What the device tier's slots take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_PAGE = 4096


@dataclass(frozen=True)
class SlotSizes:
    """Slots of ``numel`` elements: ``weights`` of ``itemsize`` bytes an element, ``gradients`` of fp32."""

    numel: int
    itemsize: int
    weights: int
    gradients: int

    @property
    def weight_bytes(self) -> int:
        return _padded(self.numel * self.itemsize)

    @property
    def gradient_bytes(self) -> int:
        return _padded(self.numel * 4)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.weights * self.weight_bytes + self.gradients * self.gradient_bytes


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
