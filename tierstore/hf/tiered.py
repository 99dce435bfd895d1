"""A transformers model over its store, in the caller's own loop::

    with open_model("runs/q", host_budget="4GiB") as tiered:
        model = tiered.model  # transformers' own class
        model.train()
        for batch in loader:
            with tiered.step(lr=1e-5, max_grad_norm=1.0) as step:
                for micro in batch:
                    step.backward(model(**micro).loss / len(batch))
        tiered.commit()

A step opens, with its learning rate, before its first forward pass, and has any number of passes. No parameter changes
before the step ends: then the gradient norm is taken over dense parameters and experts together, and either all of them
are stepped or, if a loss or a gradient is not finite, none. Gradient checkpointing, evaluation and ``generate`` are the
model's own.

``TieredOptimizer`` does the same for ``Trainer``, accelerate and schedulers: a step opens with the first training forward
pass after the last one, with the optimizer's learning rate at that moment, and ends with ``step()``. ``zero_grad()``
between the two abandons the step if it has had a backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tierstore.config import load
from tierstore.errors import ConfigError, StoreMissingError
from tierstore.hf.checkpoint import Checkpoint
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Manifest, Weights
from tierstore.hf.model import HfModel
from tierstore.hf.spec import stored_spec
from tierstore.hf.watching import Autocast, PassWatch, StoreMark, guarded
from tierstore.machine import MemoryAccount
from tierstore.model.store_schema import STATE_KEY
from tierstore.parallel import RankEnvironment
from tierstore.store.disk.home import IDENTITY
from tierstore.store.reading import read_states
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import Track
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import fixed_cost
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop, set_deterministic
from tierstore.train.stepping import OpenStep, SessionParts, StepError, StepOutcome, Stepper
from tierstore.units import parse_size


@contextlib.contextmanager
def open_model(
    store: Path | str,
    source: Path | str | None = None,
    *,
    host_budget: int | str = "1GiB",
    autocast: Autocast = Autocast.REFUSED,
    options: ImportOptions | None = None,
    settings: Mapping[str, object] | None = None,
) -> Iterator[TieredModel]:
    """The model that was imported into ``store``, as last committed. Closed at exit; uncommitted steps are lost.

    ``source``: a model directory, imported first (with ``options``) if there is no such store or its import was cut short.
    ``host_budget``: memory for experts, as bytes or as text. ``settings``: keys of ``TrainConfig`` by dotted name
    (``{"adamw.weight_decay": 0.0}``); ``lora.rank`` trains low-rank pairs beside weights that were imported frozen.

    Raises ConfigError, BudgetError, CapabilityError, StoreError, OSError, and StepError at exit if a step is open.
    """
    store = Path(store)
    if RankEnvironment.from_environment().world > 1:
        raise ConfigError("open_model: your own loop runs on one rank only; tierstore train runs on several")
    _check_settings(settings or {})
    config = load(TrainConfig, None, {"store": store, **(settings or {})})
    if source is not None:
        weights = Weights.FROZEN if config.lora.enabled else Weights.TRAINABLE
        _import(Path(source), store, options or ImportOptions(weights=weights))
    spec = stored_spec(store, config.finetune, config.lora)
    if spec is None:
        raise StoreMissingError(
            f"{store}: no imported model; tierstore import makes one of a model directory"
        )
    config = replace(config, model=spec, host_budget=parse_size(host_budget, name="host_budget"))
    watch = PassWatch(autocast)
    with _torch_as_before(), open_parts(config, Opening.RESUME, loop=Loop.EXTERNAL, watch=watch) as parts:
        tiered = TieredModel(parts, watch)
        with guarded(tiered.model, tiered.mark):
            yield tiered
            tiered.close()


#: Settings that do nothing here: arguments of ``open_model``, the loop, or ``tiered.step`` take their place.
_NOT_OWN = frozenset(
    {
        *("store", "host_budget", "steps", "clip_norm", "commit_every", "snapshot_every", "eval_every"),
        *("eval_batches", "sample_tokens", "finetune.seq_len", "finetune.aux_loss_weight"),
    }
)


def _check_settings(settings: Mapping[str, object]) -> None:
    """Raises ConfigError for a key that would do nothing here."""
    for name in settings:
        if name in _NOT_OWN or name.startswith(("data.", "schedule.", "model.")):
            raise ConfigError(f"{name}: your own loop decides this, so the setting would do nothing")


@contextlib.contextmanager
def _torch_as_before() -> Iterator[None]:
    """Restores torch's determinism and thread count at exit."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        set_deterministic(mode)
        torch.set_num_threads(threads)


def _import(source: Path, store: Path, options: ImportOptions) -> None:
    """Imports ``source``, unless ``store`` holds a complete import. Raises ConfigError if that is of another model.
    ``source`` need not exist once the import is complete.
    """
    if not (store / IDENTITY).exists() or not read_states(store, STATE_KEY):
        import_model(source, store, options)
        return
    manifest = Manifest.read(store)
    if options.compute not in (None, manifest.compute):
        raise ConfigError(f"{store}: the model was imported to compute in {manifest.compute.value}")
    if source.exists() and Checkpoint.open(source).fingerprint() != manifest.fingerprint:
        raise ConfigError(f"{store}: holds an import of another checkpoint, not of {source}")


class TieredModel:
    """An open model and its store; ``open_model`` makes it. One thread at a time."""

    def __init__(self, parts: SessionParts, watch: PassWatch) -> None:
        #: The session's parts (store, schedule, counters), and where the loop stands.
        self.parts, self.watch = parts, watch
        self._stepper = Stepper(parts)
        self._stack = contextlib.ExitStack()
        #: The store's identity and step, for a loop's checkpoints.
        self.mark = StoreMark(parts.config.store, parts.state)
        model = cast(HfModel, parts.model)
        #: The model: an instance of the transformers class, whose experts are no parameters.
        self.model: Any = model.module
        self.model.eval()  # as from_pretrained returns it
        watch.attach(model, parts, self._stepper)

    @property
    def position(self) -> int:
        """Steps that were taken, skipped or abandoned since the import."""
        return self.parts.state.position

    def account(self, rows: int, length: int) -> MemoryAccount:
        """What the process will hold if a pass has at most ``rows`` sequences of ``length`` tokens."""
        config = self.parts.config
        spec = config.spec.vary("seq_len", length) or config.spec
        config = replace(config, model=spec, data=replace(config.data, batch_size=rows, micro_batches=1))
        device = DeviceKind.of(self.parts.mesh.device.type)
        process = self.parts.account.parts["process"]
        return fixed_cost(config, process, device=device, text=0).account(config, device)

    # Steps --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(
        self, lr: float, *, max_grad_norm: float | None = None, backward_passes: int | None = None
    ) -> Iterator[TieredStep]:
        """One optimizer step, taken at the end of the block.

        ``max_grad_norm``: clips the gradients of the whole model, experts included, as ``clip_grad_norm_`` does.
        ``backward_passes``: their number in this step; if experts' gradients do not fit in memory, a step that knows the
        number reads each of them once less. Raises StepError if the block lacks a part of a step; if the block raises, the
        step is not taken.
        """
        step = self.open_step(lr, max_grad_norm=max_grad_norm, backward_passes=backward_passes)
        try:
            yield step
        except BaseException as error:
            self.abort_step(error)
            raise
        self.close_step()

    def optimizer(
        self, lr: float, *, max_grad_norm: float | None = None, backward_passes: int | None = None
    ) -> TieredOptimizer:
        """A ``torch.optim.Optimizer`` for loops that need one: its step opens with the first training forward pass."""
        return TieredOptimizer(self, lr, max_grad_norm=max_grad_norm, backward_passes=backward_passes)

    def commit(self, *, snapshot: str | None = None) -> int:
        """Makes everything up to the last step durable; returns the commit's generation. Raises StepError in a step."""
        if self.watch.step is not None:
            raise StepError(f"commit: {self._open_message()}")
        return self._stepper.commit(snapshot=snapshot)

    def state_dict(self) -> dict[str, Tensor]:
        """Commits, and returns the store's identity and step, for ``Accelerator.register_for_checkpointing``.

        Raises as ``commit``.
        """
        self.commit()
        return self.mark.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads nothing. Raises StepError if ``state`` is of another store or another step than this one."""
        self.mark.load_state_dict(state)

    # For the drivers of steps -------------------------------------------------------------------------------

    def open_step(self, lr: float, *, max_grad_norm: float | None, backward_passes: int | None) -> TieredStep:
        """Opens a step, which ``close_step`` or ``abort_step`` ends."""
        if not (math.isfinite(lr) and lr >= 0):
            raise StepError(f"lr: expected a number of at least 0, got {lr}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise StepError(f"max_grad_norm: expected more than 0, or None, got {max_grad_norm}")
        opened = self._stack.enter_context(self._stepper.step(lr, passes=backward_passes))
        opened.clip_norm = max_grad_norm or 0.0
        self.watch.begin_step(opened)
        return TieredStep(self.parts, self.watch, opened)

    def close_step(self) -> None:
        """Takes the open step; raises StepError, and abandons the step, if it is not complete."""
        step, problem = self.watch.step, None
        assert step is not None
        try:
            self.watch.settle()
            if step.outcome is StepOutcome.OPEN:
                problem = self._incomplete(step)
            if problem is not None:
                step.abandon()
        except BaseException as error:
            self.abort_step(error)
            raise
        try:
            self._stack.close()
        finally:
            self.watch.end_step()
        if problem is not None:
            raise StepError(problem)

    def abort_step(self, error: BaseException) -> None:
        """Abandons the open step. Within a pass this poisons the store, which then only has its last commit."""
        step = self.watch.step
        assert step is not None
        try:
            self.watch.settle()
            self.parts.store.failures.check()
        except Exception:
            with contextlib.suppress(BaseException):
                self._stack.__exit__(type(error), error, error.__traceback__)
        else:
            step.abandon()
            self._stack.close()
        finally:
            self.watch.end_step()

    def close(self) -> None:
        """Stops watching. If a step is open, abandons it and raises StepError."""
        self.watch.detach()
        if self.watch.step is not None:
            problem = StepError(self._open_message())
            self.abort_step(problem)
            raise problem

    def _incomplete(self, step: OpenStep) -> str | None:
        if self.watch.is_due():
            return "the step ends before the backward pass of its last forward pass"
        if not self.watch.passes:
            return "the step ends without a backward pass; call step.abandon() to end it without one"
        if step.passes not in (None, self.watch.passes):
            return f"the step ends after {self.watch.passes} of {step.passes} backward passes"
        return None

    def _open_message(self) -> str:
        return (
            f"a step with {self.watch.passes} backward passes is open: end it first (with optimizer.step(), where it was "
            "opened by one)"
        )


class TieredStep:
    """A step in progress. ``loss``, ``grad_norm`` and ``skipped`` are known once it has ended."""

    def __init__(self, parts: SessionParts, watch: PassWatch, step: OpenStep) -> None:
        self._parts = parts
        self._watch = watch
        self._step = step
        self.lr = step.lr
        #: The sum of the losses passed to ``backward``.
        self.loss = 0.0

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients, before clipping; not finite if the step was not taken."""
        return self._step.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the step ended and was not taken: a loss or a gradient was not finite, or it was abandoned."""
        return self._step.outcome not in (StepOutcome.OPEN, StepOutcome.TAKEN)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the last forward pass from ``loss``, a scalar. A loss that is not finite skips the step.

        ``loss.backward()`` also works; a loss that is not finite is then noticed by its gradients.
        """
        if self._watch.step is not self._step:
            raise StepError("backward: the step has ended")
        self._watch.settle()
        if not self._watch.is_due():
            raise StepError("backward: no forward pass with gradients has run since the last backward pass")
        value = float(loss.detach())
        if not math.isfinite(value):
            self._step.skip()
        if self._step.outcome is not StepOutcome.OPEN:
            self._watch.drop_pass()  # its gradients are not wanted
            return
        with self._parts.timeline.span(Track.COMPUTE, f"backward {self._parts.state.position}"):
            torch.autograd.backward(loss)
        if self._watch.is_due():
            raise StepError("backward: the loss does not depend on the last forward pass")
        self._watch.settle()
        self.loss += value
        self._parts.state.train_loss = self.loss

    def abandon(self) -> None:
        """Marks the step as not to be taken; its gradients so far are dropped."""
        if self._watch.step is not self._step:
            raise StepError("abandon: the step has ended")
        self._watch.settle()
        self._watch.drop_pass()
        self._step.abandon()


class TieredOptimizer(Optimizer):
    """AdamW over dense parameters and experts. Its moments are in the store, so ``state`` is empty.

    Only ``lr`` may change from step to step; the others stay as the model was opened with (``adamw``).
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
        #: Norm of the last step's gradients, before clipping; not finite if the step was not taken.
        self.grad_norm = float("nan")

    @property
    def is_open(self) -> bool:
        """Whether there was a training forward pass since the last ``step()``."""
        return self._step is not None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes the step. Raises StepError if there was no backward pass, or ``lr`` has changed since the step opened."""
        if closure is not None:
            raise StepError("optimizer.step: closures are not supported")
        step = self._step
        if step is None:
            raise StepError("optimizer.step: no training forward pass has run since the last step")
        if (lr := self._lr()) != step.lr:
            raise StepError(
                f"lr: the step was opened with {step.lr} by its first forward pass, but lr is {lr} now; set it before"
            )
        self._step = None
        self._tiered.close_step()
        self.grad_norm = step.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Abandons the open step if it has had backward passes."""
        self._tiered.watch.settle()
        if self._step is not None and self._tiered.watch.passes:
            self.abandon()

    def abandon(self) -> None:
        """Abandons the open step."""
        step, self._step = self._step, None
        if step is not None:
            step.abandon()
            self._tiered.close_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the optimizer's own group, once. Raises StepError for another group."""
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
                raise StepError(f"{name}: {value} since the model was opened; it cannot change to {found}")
        return float(group["lr"])
