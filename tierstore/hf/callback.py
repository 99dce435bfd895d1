"""``transformers.Trainer`` over a tiered model: its optimizer, and a callback that commits and checks.

``Trainer`` steps the dense parameters that it sees. Here it sees no gradients: they are in the store's slices, and
``TieredOptimizer.step`` steps dense parameters and experts together, clipped together. The callback does the rest:

* ``on_pre_optimizer_step``, ``on_optimizer_step``: the open step is taken once; one that a scaler skipped is abandoned.
* ``on_substep_end``: a pass of a step has ended, and others follow.
* ``on_save``: the store commits after the files of the checkpoint are written. They hold no weights, only the store's
  identity and step: ``train(resume_from_checkpoint=...)`` compares these, and continues from the store's last commit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tierstore.hf.tiered import TieredModel, TieredOptimizer
from tierstore.train.stepping import StepError


class TieredCallback(TrainerCallback):
    """Connects transformers' ``Trainer``: ``Trainer(tiered.model, optimizers=(optimizer, None), callbacks=[...])``.

    The optimizer clips: ``max_grad_norm`` of the training arguments must equal its own (0 stands for None). Raises StepError
    if it does not, and for arguments that a store cannot carry out.
    """

    def __init__(self, tiered: TieredModel, optimizer: TieredOptimizer) -> None:
        self._tiered = tiered
        self._optimizer = optimizer
        self._control: Any = None
        self._refuse = tiered.model.save_pretrained
        tiered.model.save_pretrained = self._save

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raises StepError for another optimizer, and for arguments that ``Trainer`` cannot carry out over a store."""
        held = others.get("optimizer")
        if getattr(held, "optimizer", held) is not self._optimizer:
            raise StepError(
                "Trainer: expected optimizers=(optimizer, None) with the optimizer of this callback"
            )
        if (args.max_grad_norm or 0.0) != (self._optimizer.max_grad_norm or 0.0):
            raise StepError(
                f"max_grad_norm: {args.max_grad_norm} in the training arguments, but {self._optimizer.max_grad_norm} in the "
                "optimizer, which does the clipping; set both to the same value (0 and None clip nothing)"
            )
        if args.load_best_model_at_end:
            raise StepError(
                "load_best_model_at_end: a store keeps only its last commit, so no earlier model can be loaded"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """``Trainer`` may write a checkpoint after this event."""
        self._control = control

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A pass has ended: ends it for the store too, and checks that the pass was complete."""
        self._tiered.watch.settle()
        if not self._optimizer.is_open:
            raise StepError(
                "Trainer: a substep ended with no step open: its forward pass did not go through the tiered model"
            )

    #: The gradients are complete.
    on_pre_optimizer_step = on_substep_end

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """``optimizer.step()`` was called, or a scaler skipped it; a skipped step is abandoned."""
        self._optimizer.abandon()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Reports the norm of all gradients, where ``Trainer`` found none."""
        for shown in (logs, state.log_history[-1] if state.log_history else None):
            if shown is not None and "grad_norm" in shown:
                shown["grad_norm"] = self._optimizer.grad_norm

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The files of the checkpoint are written: commits the store."""
        self._tiered.commit()

    def _save(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """What ``Trainer`` calls for a checkpoint, and also for ``save_model``, which is refused."""
        if self._control is None or not self._control.should_save:
            self._refuse(directory, **options)
        self._tiered.mark.write(Path(directory))
