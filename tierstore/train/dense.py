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
        self._optimizer = torch.optim.AdamW(
            [unit.flat for unit in self._units],
            lr=1.0,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._set_state(0)

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

    def _set_state(self, step: int) -> None:
        for unit in self._units:
            self._optimizer.state[unit.flat] = {
                "step": torch.tensor(float(step), device=self._device),
                **unit.moments,
            }

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients and moments."""
        return sum(unit.flat.numel() * 16 for unit in self._units)

    def zero_grad(self) -> None:
        for unit in self._units:
            assert unit.flat.grad is not None
            unit.flat.grad.zero_()

    def sum_of_squares(self) -> float:
        """Of all gradients, in double precision, added in unit order."""
        total = 0.0
        for unit in self._units:
            assert unit.flat.grad is not None
            total += float(torch.linalg.vector_norm(unit.flat.grad, dtype=torch.float64)) ** 2
        return total

    def scale_gradients(self, scale: float) -> None:
        for unit in self._units:
            assert unit.flat.grad is not None
            unit.flat.grad.mul_(scale)

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

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
        self._set_state(step)


def _groups(unit: _Unit) -> dict[Group, list[Buffer]]:
    return {
        Group.WEIGHTS: [unit.staging["weight"]],
        Group.MOMENTS: [unit.staging["exp_avg"], unit.staging["exp_avg_sq"]],
    }


def _numel(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _schema_name(numel: int) -> str:
    return f"dense-{numel}"
