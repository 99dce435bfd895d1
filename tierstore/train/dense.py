"""Dense parameters: flat, on the device, stepped by torch's fused AdamW; records of the store at commits.

Each unit of the model (a block; embedding, norm and head) has its parameters side by side in one flat tensor, with
gradient and moments alike: a view for each parameter, one record for each unit. The flat tensors lie in page-aligned
memory, so a commit writes them without a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tierstore._native import Arena, Buffer, HugePages
from tierstore.store.adamw import AdamWConfig
from tierstore.store.format import SECTION_ALIGNMENT, Group, Placement, RecordSchema
from tierstore.store.parameter_store import ParameterStore
from tierstore.tiers.device import tensor_of

__all__ = ["DenseParameters", "dense_schemas"]

_ARRAYS = ("weight", "exp_avg", "exp_avg_sq")
Units = Sequence[tuple[str, list[nn.Parameter]]]


def dense_schemas(units: Units) -> list[RecordSchema]:
    """One schema for each size that a unit has."""
    sizes = sorted({_numel(parameters) for _, parameters in units})
    return [RecordSchema(_schema_name(size), size, placement=Placement.DIRECT) for size in sizes]


@dataclass(frozen=True)
class _Unit:
    key: str
    parameters: list[nn.Parameter]
    staging: dict[str, Buffer]
    host: dict[str, torch.Tensor]
    flat: nn.Parameter
    moments: dict[str, torch.Tensor]


class DenseParameters:
    """Takes over the parameters of ``units``: they become views of flat tensors on ``device``."""

    def __init__(self, units: Units, device: torch.device, config: AdamWConfig) -> None:
        self._device = device
        self._units = [self._take_over(name, parameters) for name, parameters in units]
        self._config = config
        self._step = [torch.zeros((), device=device) for _ in self._units]

    def _take_over(self, name: str, parameters: list[nn.Parameter]) -> _Unit:
        numel = _numel(parameters)
        size = -(-numel * 4 // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        arena = Arena(size * len(_ARRAYS), HugePages.AUTO)
        staging = {a: Buffer(arena, [(i * size, size)], numel * 4) for i, a in enumerate(_ARRAYS)}
        host = {a: tensor_of(staging[a], torch.float32) for a in _ARRAYS}
        own = {a: host[a] if self._device.type == "cpu" else host[a].to(self._device) for a in _ARRAYS}
        flat = nn.Parameter(own["weight"])
        flat.grad = torch.zeros_like(flat)
        offset = 0
        with torch.no_grad():
            for parameter in parameters:
                span = slice(offset, offset + parameter.numel())
                flat.data[span].copy_(parameter.reshape(-1))
                parameter.data = flat.data[span].view_as(parameter)
                parameter.grad = flat.grad[span].view_as(parameter)
                offset += parameter.numel()
        moments = {a: own[a] for a in _ARRAYS[1:]}
        return _Unit(f"dense.{name}", parameters, staging, host, flat, moments)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients and moments."""
        return sum(unit.flat.numel() * 16 for unit in self._units)

    def zero_grad(self) -> None:
        for unit in self._units:
            _gradient(unit).zero_()

    def sum_of_squares(self) -> float:
        """Of all gradients, in double precision, added in unit order."""
        total = 0.0
        for unit in self._units:
            total += float(torch.linalg.vector_norm(_gradient(unit), dtype=torch.float64)) ** 2
        return total

    def scale_gradients(self, scale: float) -> None:
        for unit in self._units:
            _gradient(unit).mul_(scale)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One AdamW step with torch's fused kernel.

        It is called without ``torch.optim``, whose classes import the whole of the compiler: 80 MiB and a second.
        """
        for step in self._step:
            step += 1
        torch._fused_adamw_(
            [unit.flat for unit in self._units],
            [_gradient(unit) for unit in self._units],
            [unit.moments["exp_avg"] for unit in self._units],
            [unit.moments["exp_avg_sq"] for unit in self._units],
            [],
            self._step,
            lr=lr,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=self._config.weight_decay,
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
        )

    # Records ------------------------------------------------------------------------------------------------

    def record_counts(self) -> dict[str, int]:
        """Records of each schema."""
        return dict(Counter(_schema_name(unit.flat.numel()) for unit in self._units))

    def register(self, store: ParameterStore) -> None:
        for unit in self._units:
            store.register(unit.key, _schema_name(unit.flat.numel()))

    def save(self, store: ParameterStore, step: int) -> None:
        """Queues the write of every unit; nothing may change until the commit has returned."""
        for unit in self._units:
            if self._device.type != "cpu":
                own = {"weight": unit.flat.data, **unit.moments}
                for name in _ARRAYS:
                    unit.host[name].copy_(own[name])
            store.write_through(unit.key, _groups(unit), step=step)

    def load(self, store: ParameterStore, step: int) -> None:
        """Reads every unit as of the last commit, which had ``step`` optimizer steps."""
        for unit in self._units:
            store.read_through(unit.key, _groups(unit))
            if self._device.type != "cpu":
                unit.flat.data.copy_(unit.host["weight"])
                for name in _ARRAYS[1:]:
                    unit.moments[name].copy_(unit.host[name])
        for count in self._step:
            count.fill_(float(step))


def _gradient(unit: _Unit) -> torch.Tensor:
    assert unit.flat.grad is not None
    return unit.flat.grad


def _groups(unit: _Unit) -> dict[Group, list[Buffer]]:
    return {
        Group.WEIGHTS: [unit.staging["weight"]],
        Group.MOMENTS: [unit.staging["exp_avg"], unit.staging["exp_avg_sq"]],
    }


def _numel(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _schema_name(numel: int) -> str:
    return f"dense-{numel}"
