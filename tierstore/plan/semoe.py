"""The storage formulas of SE-MoE, section 2.1, and what its garbled equation must be.

The text keeps equation 2, ``P = S + D``, and loses equation 1. What precedes it gives, for a *device* (a node; eight
GPUs by default) of sizes M_GPU, M_CPU and M_SSD, of which there are N:

* GPU: dense states in forward, backward and update. The text prints ``2D + 2D + 2D + 2D + 4D = 16D``; its own list is
  fp16 parameters 2, fp16 gradients 2, fp32 masters 4, fp32 momentum 4 and fp32 variance 4 bytes: it must read
  ``2D + 2D + 4D + 4D + 4D``, which is the 16 D that it states (as printed the sum is 12 D). With ZeRO-3 each byte is on one
  GPU alone, so the total is counted once over all devices. Besides, of one MoE layer at a time, the
  experts that are activated: fp16 parameters and gradients, ``2 alpha S / L + 2 alpha S / L = 4 alpha S / L``.
* CPU: a cache of the states of the activated share, ``16 alpha S``.
* SSD: masters, momentum and variance of all of them, ``12 S`` (the fp16 parameter follows from the master, the gradient
  lives for one step: neither is stored).

"The relationship between each storage device and the states" can then only be that each total fits what N devices have::

    16 D + 4 alpha S / L <= N M_GPU,    16 alpha S <= N M_CPU,    12 S <= N M_SSD        (1)

and equation 2 is the scale that is reached at the largest S and D that satisfy it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture


@dataclass(frozen=True)
class PaperDevice:
    """M_GPU, M_CPU and M_SSD of one device of the paper (a node with all its GPUs), bytes."""

    gpu: int
    cpu: int
    ssd: int


@dataclass(frozen=True)
class PaperBytes:
    """The left sides of equation 1: bytes over all devices."""

    gpu: int
    cpu: int
    ssd: int

    def fits(self, device: PaperDevice, devices: int) -> bool:
        """Whether equation 1 holds on ``devices`` devices."""
        return (
            self.gpu <= devices * device.gpu
            and self.cpu <= devices * device.cpu
            and self.ssd <= devices * device.ssd
        )


def paper_bytes(model: Architecture, alpha: float) -> PaperBytes:
    """Bytes by the paper's formulas; ``alpha`` is the share of sparse parameters that is activated."""
    _check_share(alpha)
    layers = max(len(model.moe_layers), 1)
    return PaperBytes(
        gpu=16 * model.dense + round(4 * alpha * model.sparse / layers),
        cpu=round(16 * alpha * model.sparse),
        ssd=12 * model.sparse,
    )


def largest_sparse(device: PaperDevice, devices: int, *, dense: int, layers: int, alpha: float) -> int:
    """The largest S that equation 1 admits; 0 where the dense states alone do not fit."""
    _check_share(alpha)
    left = devices * device.gpu - 16 * dense
    if left < 0:
        return 0
    bounds = [devices * device.ssd / 12]
    if alpha > 0:
        bounds += [devices * device.cpu / (16 * alpha), left * layers / (4 * alpha)]
    return int(min(bounds))


def _check_share(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha: expected a share from 0 to 1, got {alpha}")
