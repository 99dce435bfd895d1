"""A training run's model on an emulated device: what it computes takes the time that floating point operations would.

The device is the calling thread asleep, in both passes, where a real one would compute: in front of a block's attention (for
the whole block outside its experts), in front of the last norm (for the head), and in each product with an expert's
weights. All else is what training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tierstore.bench.pipemoe.device import DeviceSpeed, SleepingDevice, slow_weights
from tierstore.bench.stages import taking
from tierstore.dense.gates import PassListener
from tierstore.machine_profile import Cost
from tierstore.model.config import ModelConfig
from tierstore.model.transformer import Block, Transformer
from tierstore.moe.source import ExpertLease, ExpertSource, JointSource

#: Beside floating point operations, what starting a pass over a block, and over an expert's rows, takes.
DENSE = Cost(1e-3, 2e8)
EXPERT = Cost(0.5e-3, 2e8)


@dataclass(frozen=True)
class EmulatedModel:
    """The device of one rank, which has ``tensor`` parts of the matrices of ``config``'s blocks."""

    config: ModelConfig
    tensor: int

    def block_s(self, tokens: int) -> float:
        """A block's forward pass outside its experts: four square matrices, and attention over all positions."""
        width = self.config.d_model
        return DENSE.seconds(2 * tokens * width * (4 * width + self.config.seq_len) / self.tensor)

    def head_s(self, tokens: int) -> float:
        return DENSE.seconds(2 * tokens * self.config.d_model * self.config.vocab_size)

    def slow_down(self, model: nn.Module) -> None:
        """Makes the passes of ``model``, a whole one or that of a stage, take their time."""
        assert isinstance(model, Transformer)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention.register_forward_pre_hook(_waiting(self.block_s))
        if model.ends:
            model.norm.register_forward_pre_hook(_waiting(self.head_s))

    def listener(self, queue: PassListener) -> PassListener:
        return queue

    def source(self, experts: JointSource) -> ExpertSource:
        numel = self.config.expert_shape.numel
        device = SleepingDevice()
        device.speed = DeviceSpeed(EXPERT.latency_s, 2 * numel / EXPERT.per_s)
        return _SlowExperts(experts, device)


def _waiting(seconds: Callable[[int], float]) -> Callable[[nn.Module, Any], Any]:
    """A hook that makes forward passes take ``seconds`` of their tokens, and backward passes twice that."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = arguments[0]
        spent = seconds(x.numel() // x.shape[-1])
        return (taking(x, spent, 2 * spent), *arguments[1:])

    return hook


class _SlowExperts:
    """The experts of ``source``, whose products take their time on ``device``."""

    def __init__(self, source: ExpertSource, device: SleepingDevice) -> None:
        self._source, self._device = source, device

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._slow(self._source.forward(layer, experts), times=1)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._slow(self._source.backward(layer, experts), times=2)

    def _slow(self, leases: Iterator[ExpertLease], *, times: int) -> Iterator[ExpertLease]:
        for lease in leases:
            self._device.times = times
            yield replace(lease, weights=slow_weights(lease.flat, self._device.product))
