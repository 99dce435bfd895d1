"""The passes of somebody else's loop, seen from inside: where one begins and ends, and whether it belongs to a step.

A training pass is a forward pass with gradients inside of an open step, and the backward pass that follows it. Every
other forward pass is an evaluation: it may come at any time but between the two. What does not fit raises StepError
before anything is computed, so that a loop that leaves something out gets an error and no other results.

The end of a backward pass has no hook of a module: it is taken up when the loop does the next thing, and autograd says
then whether the pass came to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.cache.access import Phase
from tierstore.dense.gates import PassListener
from tierstore.hf.model import HfModel
from tierstore.moe.source import ExpertLease, ExpertSource
from tierstore.train.stepping import OpenStep, SessionParts, StepError, Stepper


class Autocast(Enum):
    """Whether forward passes may run under ``torch.autocast``. Experts are computed in the store's type all the same."""

    REFUSED = "refused"
    ALLOWED = "allowed"


class LoopState(Enum):
    """Where the loop stands."""

    IDLE = "idle"
    FORWARD = "forward"  # inside of a forward pass
    READY = "ready"  # a training forward pass has returned; its backward pass is due
    BACKWARD = "backward"  # that has begun, and may have returned


class PassWatch:
    """Watches the passes of one model (a ``SessionWatch``, its ``PassListener`` and its ``ExpertSource``).

    ``opener`` opens a step where a training forward pass finds none: an optimizer-like object's.
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

    # What it stands between ---------------------------------------------------------------------------------

    def listener(self, queue: PassListener) -> PassListener:
        """Hears of passes before ``queue`` does."""
        self._queue = queue
        return self

    def source(self, experts: ExpertSource) -> ExpertSource:
        """Is asked for ``experts``."""
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
        """They belong to none."""
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
        """The backward pass that is due will not come."""
        if self.state is LoopState.READY:
            self.state = LoopState.IDLE

    def poison(self, reason: str) -> None:
        """The store takes nothing more: its last commit stands."""
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
            # Called when the pass has come to its end, not when it raised.
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
        ):  # BACKWARD: computed again, by checkpointing
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
                f"{changed[0]}: what is trained has changed since the model was opened: parameters were added, replaced, "
                "frozen or thawed, and the store does not step them so; for adapters open it with settings lora.rank"
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
    """Of a call of a causal language model: bool (B, T), False for padding; None without an attention mask of tokens."""
    given = dict(zip(("input_ids", "attention_mask"), arguments, strict=False)) | options
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    mask = given.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or not isinstance(tokens, torch.Tensor) or mask.dim() != 2:
        return None
    rows, length = tokens.shape[:2]
    if mask.shape[0] != rows or mask.shape[1] < length:
        return None  # the model itself refuses it
    return mask[:, -length:] != 0  # before these come those of a cache


def _types(module: nn.Module) -> dict[str, torch.dtype]:
    """What ``module.to(dtype)`` would change: buffers, too, which some families keep in fp32."""
    found = {name: value.dtype for name, value in module.named_parameters()}
    found.update((name, value.dtype) for name, value in module.named_buffers())
    return found


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
