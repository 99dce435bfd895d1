"""Module hooks that detect, from outside of the model, where passes over the parameter groups begin and end.

The U groups are passed in order, each in one pass forward and one backward: 0 (embedding), the blocks, U - 1 (norm and
head). Hooks on modules detect forward passes. A block's backward pass begins when the gradient of its output exists. It
ends when the gradients of all its parameters do, or when the backward pass of the previous block begins, if some gradients
never come. The recomputation of a block (activation checkpointing) is part of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierstore.cache.access import Phase
from tierstore.model.interface import DenseModel


class PassListener(Protocol):
    """Receives passes, one after another: each ``enter`` is followed by its ``leave``."""

    def enter(self, unit: int, phase: Phase) -> None:
        """A pass begins: returns when the group's parameters are whole."""
        ...

    def leave(self, unit: int, phase: Phase) -> None:
        """A pass has ended."""
        ...


class Gates:
    """Hooks on ``model`` until ``remove``.

    ``arrive(unit, index, gradient)`` takes each gradient; ``flush(unit)`` is called when a group's backward pass ends,
    before ``leave``. ``saving`` makes the context in which forward passes run. One thread at a time.

    While a caller drives the passes (``driven``), hooks on modules do nothing.
    """

    def __init__(
        self,
        model: DenseModel,
        parameters: Sequence[Sequence[nn.Parameter]],
        listener: PassListener,
        *,
        arrive: Callable[[int, int, Tensor], None],
        flush: Callable[[int], None],
        saving: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model = model
        self._listener = listener
        self._arrive = arrive
        self._flush = flush
        self._saving = saving
        self._context: AbstractContextManager[Any] | None = None
        self._driver: Callable[[int, int, Tensor], None] | None = None
        self._open: tuple[int, Phase] | None = None
        self._counts = [len(unit) for unit in parameters]
        self._arrived: list[set[int]] = [set() for _ in parameters]
        self._last = len(parameters) - 1
        self._next = -1  # the group whose backward pass comes next
        self._handles: list[RemovableHandle] = [
            model.module.register_forward_pre_hook(self._begin_forward),
            # Called even after an exception: the context must be left.
            model.module.register_forward_hook(self._end_forward, always_call=True),
        ]
        for unit, block in enumerate(model.blocks, start=1):
            self._handles.append(block.register_forward_pre_hook(partial(self._begin_block, unit)))
            self._handles.append(block.register_forward_hook(partial(self._end_block, unit)))
        for unit, group in enumerate(parameters):
            for index, parameter in enumerate(group):
                taking = partial(self._take, unit, index)
                handle = parameter.register_post_accumulate_grad_hook(taking)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def driven(self, take: Callable[[int, int, Tensor], None]) -> Iterator[None]:
        """In this context the caller decides where passes begin and end, and ``take(unit, index, gradient)`` gets the
        gradients."""
        self._driver = take
        try:
            yield
        finally:
            self._driver = None

    def resume(self) -> None:
        """Prepares for the backward pass of an earlier forward pass, after possible other passes."""
        self._next = self._last
        for arrived in self._arrived:
            arrived.clear()

    def close(self) -> None:
        """Called when the backward pass has returned: ends the remaining passes, which no gradient has reached."""
        self.begin_backward(0)
        if self._open is not None:
            self._leave()

    def begin_backward(self, unit: int) -> None:
        """Begins the group's backward pass, if it has not begun; ends those of later groups."""
        while self._next >= unit:
            self._enter(self._next, Phase.BACKWARD)
            self._next -= 1

    def _enter(self, unit: int, phase: Phase) -> None:
        if self._open is not None:
            self._leave()
        self._open = (unit, phase)
        self._listener.enter(unit, phase)

    def _leave(self) -> None:
        assert self._open is not None
        unit, phase = self._open
        self._open = None
        if phase is Phase.BACKWARD:
            self._flush(unit)
        self._listener.leave(unit, phase)

    # Hooks --------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._driver is not None:
            return
        self._open, self._next = None, -1
        for arrived in self._arrived:
            arrived.clear()
        self._enter(0, Phase.FORWARD)
        if torch.is_grad_enabled():
            self._context = self._saving()
            self._context.__enter__()

    def _end_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._driver is not None:
            return
        training = self._context is not None
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
        if output is None:  # it raised
            self._open = None
            return
        self._leave()
        if training:
            self._next = self._last
            self._watch(self._model.made(output), self._last)

    def _begin_block(self, unit: int, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._driver is not None or self._next >= 0 or self._in_backward:
            return  # a recomputation
        self._enter(unit, Phase.FORWARD)
        if unit == 1:
            self._watch(arguments[0], 0)

    def _end_block(self, unit: int, block: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._driver is not None or self._next >= 0 or self._in_backward:
            return
        self._watch(self._model.stream(output), unit)
        if unit == self._last - 1:
            self._enter(self._last, Phase.FORWARD)
        else:
            self._leave()

    @property
    def _in_backward(self) -> bool:
        return self._open is not None and self._open[1] is Phase.BACKWARD

    def _watch(self, made: Tensor | None, unit: int) -> None:
        """Begins the group's backward pass when the gradient of ``made`` exists."""
        if made is not None and made.requires_grad and torch.is_grad_enabled():

            def begin(gradient: Tensor) -> None:
                self.begin_backward(unit)

            made.register_hook(begin)  # type: ignore[no-untyped-call]

    def _take(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if self._driver is not None:
            gradient, parameter.grad = parameter.grad, None
            self._driver(unit, index, gradient)
            return
        if index in self._arrived[unit]:
            parameter.grad = None
            raise RuntimeError(
                "a second backward pass through one forward pass: add up the losses and call backward once"
            )
        self.begin_backward(unit)
        self._arrive(unit, index, parameter.grad)
        parameter.grad = None
        self._arrived[unit].add(index)
        if self._open == (unit, Phase.BACKWARD) and len(self._arrived[unit]) == self._counts[unit]:
            self._leave()
