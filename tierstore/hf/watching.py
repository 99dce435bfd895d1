"""Watches the passes of the caller's own loop, and refuses uses of a model that would leave out its experts.

A training pass is a forward pass with gradients in an open step, and the backward pass that follows it. Every other
forward pass is an evaluation, allowed at any time except between the two. A call out of order raises StepError before
anything is computed, so that a faulty loop gets an error rather than wrong results. Modules have no hook for the end of a
backward pass: it is handled at the loop's next call, when autograd has recorded whether the pass was complete.

Actions that would leave out the experts, or step parameters twice, raise too, until the store is closed:

* ``save_pretrained``, ``push_to_hub`` and ``state_dict``, of the model or a part of it, would give only the dense part, as
  it is in memory at that moment. They are refused before a file is opened.
* ``load_state_dict`` accepts only the store's identity and step (``StoreMark``), and compares them. So the
  checkpoints of ``Trainer`` and accelerate hold no weights, and belong to one commit.
* Another optimizer over parameters of the model would find no gradients. Its step is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierstore.cache.access import Phase
from tierstore.dense.gates import PassListener
from tierstore.hf.model import HfModel
from tierstore.model.store_schema import TrainState
from tierstore.moe.source import ExpertLease, ExpertSource
from tierstore.store.disk.home import read_identity
from tierstore.train.stepping import OpenStep, SessionParts, StepError, Stepper


class Autocast(Enum):
    """Whether forward passes may run under ``torch.autocast``. Experts are computed in the store's type all the same."""

    REFUSED = "refused"
    ALLOWED = "allowed"


class LoopState(Enum):
    """The loop's position between and within passes."""

    IDLE = "idle"
    FORWARD = "forward"  # within a forward pass
    READY = "ready"  # a training forward pass has returned; its backward pass is due
    BACKWARD = "backward"  # the backward pass has begun, and may have returned


class PassWatch:
    """Watches the passes of one model (a ``SessionWatch``, its ``PassListener`` and its ``ExpertSource``).

    ``opener`` opens a step if a training forward pass finds none open: ``TieredOptimizer`` sets it.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast
        self.state = LoopState.IDLE
        self.step: OpenStep | None = None
        self.opener: Callable[[], None] | None = None
        #: Backward passes that have returned in the open step.
        self.passes = 0
        self._training = False
        self._leasing = False
        self._returned = False
        self._used: set[int] = set()
        self._reached: set[int] = set()
        self._handles: list[RemovableHandle] = []

    # Wrapped interfaces -------------------------------------------------------------------------------------

    def listener(self, queue: PassListener) -> PassListener:
        """Receives the events of passes before ``queue`` does."""
        self._queue = queue
        return self

    def source(self, experts: ExpertSource) -> ExpertSource:
        """Receives the requests for ``experts``."""
        self._experts = experts
        return self

    def attach(self, model: HfModel, parts: SessionParts, stepper: Stepper) -> None:
        """Watches ``model`` until ``detach``."""
        self._model, self._parts, self._stepper = model, parts, stepper
        module = model.module
        self._parameters = _trained(module)
        self._types = _types(module)
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]

    def detach(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Steps --------------------------------------------------------------------------------------------------

    def begin_step(self, step: OpenStep) -> None:
        """Training passes belong to ``step`` from now on."""
        self.step, self.passes = step, 0

    def end_step(self) -> None:
        """Training passes belong to no step from now on."""
        self.step, self.state = None, LoopState.IDLE

    def is_due(self) -> bool:
        """Whether a forward pass waits for its backward pass."""
        return self.state is LoopState.READY

    def settle(self) -> None:
        """Ends a backward pass that has returned. Raises StepError if it did not reach the experts that were used."""
        if self.state is not LoopState.BACKWARD:
            return
        missing = sorted(self._used - self._reached)
        if missing or not self._returned:
            where = f": it did not reach the experts of layer {missing[-1]}" if missing else ""
            self.poison(problem := f"a backward pass was cut short{where}")
            raise StepError(problem)
        assert self.step is not None
        self.step.end_pass()
        self.state = LoopState.IDLE
        self.passes += 1

    def drop_pass(self) -> None:
        """Drops the backward pass that is due."""
        if self.state is LoopState.READY:
            self.state = LoopState.IDLE

    def poison(self, reason: str) -> None:
        """The store accepts no further steps or commits; its last commit remains."""
        self._parts.store.failures.poison(reason)

    # Dense units (PassListener) -----------------------------------------------------------------------------

    def enter(self, unit: int, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            if self.state is not LoopState.FORWARD:
                raise StepError("a part of the model was called by itself: call the whole model")
            if unit:
                self._check_autocast()
        elif self.state is LoopState.READY:
            self.state, self._returned = LoopState.BACKWARD, False
            # autograd calls it when the pass is complete, not when the pass raised.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._note_return)
        elif phase is Phase.BACKWARD and self.state is not LoopState.BACKWARD:
            raise self._no_backward()
        self._queue.enter(unit, phase)

    def _note_return(self) -> None:
        self._returned = True

    def leave(self, unit: int, phase: Phase) -> None:
        self._queue.leave(unit, phase)

    # Experts (ExpertSource) ---------------------------------------------------------------------------------

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        if self.state not in (
            LoopState.FORWARD,
            LoopState.BACKWARD,
        ):  # BACKWARD: recomputed by gradient checkpointing
            raise StepError("a part of the model was called by itself: call the whole model")
        self._used.add(layer)
        self._leasing = True
        yield from self._experts.forward(layer, experts)
        self._leasing = False

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        if self.state is not LoopState.BACKWARD or layer in self._reached:
            raise self._no_backward()
        self._reached.add(layer)
        self._leasing = True
        yield from self._experts.backward(layer, experts)
        self._leasing = False

    def _no_backward(self) -> StepError:
        if self.step is None:
            return StepError(
                "a backward pass outside of a step: its forward pass ran in no step, or the step has ended"
            )
        return StepError(
            "a second backward pass through one forward pass: add the losses up before the first"
        )

    # The module's hooks -------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.settle()
        if self.state is LoopState.READY:
            raise StepError(
                "a forward pass begins while the backward pass of the one before is due: each forward pass of a step "
                "with gradients needs its own backward pass before the next one"
            )
        with_gradients = torch.is_grad_enabled()
        if with_gradients and module.training and self.step is None:
            if self.opener is None:
                raise StepError(
                    "a training forward pass outside of a step: open one first (with tiered.step(lr)), or evaluate with "
                    "model.eval() or torch.no_grad()"
                )
            self.opener()
        self._training = with_gradients and self.step is not None
        if self._training:
            assert self.step is not None
            self._check_parameters(module)
            self.step.begin_pass()
        else:
            self._stepper.begin_forward()
        self._model.begin_forward(_token_mask(arguments, options))
        self._used.clear()
        self._reached.clear()
        self.state = LoopState.FORWARD

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self.state is not LoopState.FORWARD:
            return  # it was refused
        if output is None:  # it raised
            self.state = LoopState.IDLE
            if self._leasing:
                self.poison("a forward pass was cut short")
            else:
                self._parts.queue.reset()
            return
        self.state = LoopState.READY if self._training else LoopState.IDLE
        if self._training:
            self._model.end_forward()

    def _check_parameters(self, module: nn.Module) -> None:
        found = _trained(module)
        changed = [name for name in found if self._parameters.get(name) is not found[name]]
        changed += [name for name in self._parameters if name not in found]
        if changed:
            raise StepError(
                f"{changed[0]}: the trained parameters have changed since the model was opened: some were added, replaced, "
                "frozen or thawed, which the store cannot follow; for adapters open the model with settings lora.rank"
            )
        for name, dtype in _types(module).items():
            if self._types.get(name, dtype) != dtype:
                raise StepError(
                    f"{name}: it was {self._types[name]} when the model was opened, and is {dtype}: the store's own compute "
                    "type decides, which tierstore import --compute chooses"
                )

    def _check_autocast(self) -> None:
        device = self._parts.mesh.device.type
        if self._autocast is Autocast.REFUSED and torch.is_autocast_enabled(device):
            raise StepError(
                f"torch.autocast ({torch.get_autocast_dtype(device)}) is active in a forward pass: the store's own "
                "compute type decides what experts are computed in; open_model(autocast=Autocast.ALLOWED) takes the rest "
                "as it is"
            )


def _token_mask(arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
    """The token mask of a causal language model's call: bool (B, T), False for padding; None without one."""
    given = dict(zip(("input_ids", "attention_mask"), arguments, strict=False)) | options
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    mask = given.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or not isinstance(tokens, torch.Tensor) or mask.dim() != 2:
        return None
    rows, length = tokens.shape[:2]
    if mask.shape[0] != rows or mask.shape[1] < length:
        return None  # the model itself refuses such a mask
    return mask[:, -length:] != 0  # the entries before these belong to cached tokens


def _types(module: nn.Module) -> dict[str, torch.dtype]:
    """Types that ``module.to(dtype)`` would change: also those of buffers, which some families keep in fp32."""
    found = {name: value.dtype for name, value in module.named_parameters()}
    found.update((name, value.dtype) for name, value in module.named_buffers())
    return found


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


# Guards -----------------------------------------------------------------------------------------------------


_ENTRY = "tierstore"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@contextlib.contextmanager
def guarded(model: Any, mark: StoreMark) -> Iterator[None]:
    """Guards ``model``; ``mark``: the store and the step of its training."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    guards = _Guards(model, mark)
    for part in model.modules():
        part.register_state_dict_pre_hook(
            partial(guards.refuse, "state_dict")
        )  # it is marked: no bound method
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = partial(guards.refuse, "save_pretrained")
            part.push_to_hub = partial(guards.refuse, "push_to_hub")
    model.register_load_state_dict_pre_hook(guards.take_state)
    model.register_load_state_dict_post_hook(guards.took_state)
    everywhere = register_optimizer_step_pre_hook(guards.before_optimizer)
    try:
        yield
    finally:
        everywhere.remove()
        model.save_pretrained = partial(guards.refuse, "save_pretrained")  # a callback had its own


class StoreMark:
    """The store's mark, the one entry of a ``state_dict``: the identity of ``store``, and the step of ``state``."""

    def __init__(self, store: Path, state: TrainState) -> None:
        self.store = store.resolve()
        self._state = state
        self._uuid = read_identity(store)

    def state_dict(self) -> dict[str, Tensor]:
        said = json.dumps({"store": self._uuid, "position": self._state.position})
        return {_ENTRY: torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)}

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Raises StepError unless ``given`` has the present mark of the store and its step."""
        if set(given) != {_ENTRY}:
            raise StepError(
                f"load_state_dict: the weights of this model are in {self.store}; tierstore import loads others"
            )
        said = json.loads(bytes(given[_ENTRY].tolist()))
        if said["store"] != self._uuid:
            raise StepError(f"the checkpoint is of another store than {self.store}")
        if said["position"] != self._state.position:
            raise StepError(
                f"the checkpoint is of step {said['position']}, but {self.store} is at step {self._state.position}: "
                "resume from the checkpoint of the store's last commit"
            )

    def write(self, directory: Path) -> None:
        """Writes the mark to the file in which a checkpoint of ``Trainer`` has its weights. Without a config.json beside it
        no program takes the file for a model. Raises StepError if ``directory`` holds a model.
        """
        from safetensors import safe_open
        from safetensors.torch import save_file

        target = directory / _WEIGHTS
        if not (taken := (directory / _CONFIG).exists()) and target.exists():
            with safe_open(target, "pt") as file:
                taken = list(file.keys()) != [_ENTRY]
        if taken:
            raise StepError(f"{directory}: holds a model, which a checkpoint of {self.store} may not replace")
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), target, {"format": "pt"})


class _Guards:
    def __init__(self, model: Any, mark: StoreMark) -> None:
        self._own = {id(parameter) for parameter in model.parameters()}
        self._mark = mark

    def refuse(self, name: str, *arguments: Any, **options: Any) -> NoReturn:
        accelerate = (
            "; for Accelerator.save_state, prepare all but the model and register_for_checkpointing(tiered)"
        )
        raise StepError(
            f"{name} would leave out the experts: commit, close the model, and tierstore.hf.export (or tierstore export) "
            f"writes all of {self._mark.store}{accelerate if name == 'state_dict' else ''}"
        )

    def take_state(self, module: Any, given: dict[str, Any], prefix: str, *others: Any) -> None:
        """Raises StepError unless ``given`` has the present mark of the store and its step."""
        self._mark.load_state_dict({name.removeprefix(prefix): value for name, value in given.items()})
        given.clear()

    def took_state(self, module: Any, keys: Any) -> None:
        """Nothing is missing: the weights are in the store."""
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    def before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Raises StepError for another optimizer that has parameters of the model."""
        from tierstore.hf.tiered import TieredOptimizer

        if isinstance(optimizer, TieredOptimizer):
            return
        if any(
            id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise StepError(
                f"{type(optimizer).__name__} holds parameters of a tiered model, whose gradients it cannot see: step with "
                "tiered.step(lr) or tiered.optimizer(lr)"
            )
