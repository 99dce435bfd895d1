"""The optimizer of a tiered model as ``torch.optim`` has them: for ``Trainer``, accelerate and schedulers.

A step opens with the first training forward pass after the last one, with the learning rate that the optimizer has then,
and ends with ``step()``. ``zero_grad()`` between the two, once there was a backward pass, gives it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from tierstore.train.stepping import StepError

if TYPE_CHECKING:
    from tierstore.hf.loop.tiered import TieredModel, TieredStep


class TieredOptimizer(Optimizer):
    """AdamW over dense parameters and experts. Its moments are in the store, so ``state`` is empty.

    Only ``lr`` may change from step to step; the others are those that the model was opened with (``adamw``).
    """

    def __init__(
        self,
        tiered: TieredModel,
        lr: float,
        *,
        max_grad_norm: float | None = None,
        backward_passes: int | None = None,
    ) -> None:
        adamw = tiered.parts.config.adamw
        self._fixed = {"betas": tuple(adamw.betas), "eps": adamw.eps, "weight_decay": adamw.weight_decay}
        super().__init__(list(tiered.model.parameters()), {"lr": lr, **self._fixed})
        if tiered.watch.opener is not None:
            raise StepError("optimizer: the model has one already")
        tiered.watch.opener = self._open
        self._tiered = tiered
        self._backward_passes = backward_passes
        self._step: TieredStep | None = None
        self.max_grad_norm = max_grad_norm
        #: Of the last step's gradients, before clipping; not finite where it was not taken.
        self.grad_norm = float("nan")

    @property
    def is_open(self) -> bool:
        """Whether there was a training forward pass since the last ``step()``."""
        return self._step is not None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes the step. Raises StepError where there was no backward pass, or ``lr`` has changed since it opened."""
        if closure is not None:
            raise StepError("optimizer.step: closures are not supported")
        step = self._step
        if step is None:
            raise StepError("optimizer.step: no training forward pass has run since the last step")
        if (lr := self._lr()) != step.lr:
            raise StepError(
                f"lr: the step was opened with {step.lr} by its first forward pass, and it is {lr} now: set it before"
            )
        self._step = None
        self._tiered.close_step()
        self.grad_norm = step.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gives up the open step, if there were backward passes in it."""
        self._tiered.watch.settle()
        if self._step is not None and self._tiered.watch.passes:
            self.abandon()

    def abandon(self) -> None:
        """Gives up the open step."""
        step, self._step = self._step, None
        if step is not None:
            step.abandon()
            self._tiered.close_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only its own, once. Raises StepError for another."""
        if self.param_groups:
            raise StepError("add_param_group: the parameters of a tiered model are one group")
        super().add_param_group(param_group)

    def _open(self) -> None:
        self._step = self._tiered.open_step(
            self._lr(), max_grad_norm=self.max_grad_norm, backward_passes=self._backward_passes
        )

    def _lr(self) -> float:
        (group,) = self.param_groups
        for name, value in self._fixed.items():
            found = tuple(group[name]) if name == "betas" else group[name]
            if found != value:
                raise StepError(
                    f"{name}: {value} since the model was opened, and a step cannot change it to {found}"
                )
        return float(group["lr"])
