"""A step in layer order: each layer takes all micro-batches before the next layer does, forward and backward.

One lease of an expert then serves all micro-batches, and dense parameters are gathered once for them. The bits are those
of micro order: products have the same shapes, and gradients are added up in the order of micro-batches.

**Forward.** Each micro-batch runs the model's own forward pass in a greenlet of its own, which stops where it enters a
block, where it requests experts, and where it leaves the last block; it resumes when all micro-batches are there. Blocks
run without a graph; their inputs, the *boundaries*, are kept. The output of a block is detached: the next graph sees a
leaf.

**Head.** One micro-batch after another computes its loss, and its backward pass runs as far as those leaves.

**Backward.** Each block, from the last to the first, is recomputed from the boundary of each micro-batch, except for its
experts, of which only the gradient is needed. The gradients of the experts' outputs come first; one lease of each expert
then serves all micro-batches; then each micro-batch passes through the rest of the block. So only the graphs of one block
are in memory, one for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tierstore.cache.access import Phase
from tierstore.dense import DenseSlices
from tierstore.dense.gates import Gates, PassListener
from tierstore.model.interface import Batch, Model, ModelOutput
from tierstore.moe.computing import ExpertPass
from tierstore.moe.joint import PendingExperts, backward_together, forward_together
from tierstore.moe.source import ExpertSourceRef
from tierstore.train.boundaries import BoundaryStore

ExpertCall = tuple[Tensor, Tensor, ExpertPass]


@dataclass(frozen=True, slots=True)
class _Entering:
    """A micro-batch before block number ``block``, with its boundary; past the last block, before the head."""

    block: int
    x: Tensor


#: The stops of a forward pass: before a block, in a block that requests experts, and at its end.
_Stop = _Entering | ExpertCall | ModelOutput


@dataclass(slots=True, eq=False)
class _Lane:
    """One micro-batch of the step in progress."""

    micro: int
    run: greenlet
    #: The model state of its forward pass, saved while another pass runs.
    state: object
    stop: _Stop | None = None
    #: By block: its arguments beside the stream, and the state in which to recompute it.
    arguments: list[tuple[tuple[Any, ...], dict[str, Any], object]] = field(default_factory=list)
    #: The tensor that the first block's gradient flows into.
    entry: GradientEdge | None = None
    #: The last block's output, and by block its outputs beside the stream: leaves of the head's graph.
    stream: Tensor | None = None
    sides: list[list[Tensor]] = field(default_factory=list)
    #: The gradient of the output of the block that is passed next.
    gradient: Tensor | None = None


class LayerOrder:
    """Takes the micro-batches of a step through ``model``; the slot's source leases the experts. Owns nothing."""

    def __init__(
        self,
        model: Model,
        dense: DenseSlices,
        listener: PassListener,
        *,
        gates: Gates,
        slot: ExpertSourceRef,
        boundaries: BoundaryStore,
    ) -> None:
        self._model = model
        self._slot = slot
        self.boundaries = boundaries
        self._groups = _GroupPasses(dense, gates, listener)
        self._blocks = list(model.blocks)
        self._lane: _Lane | None = None
        self._pending: list[PendingExperts] = []
        for number, block in enumerate(self._blocks):
            block.register_forward_pre_hook(partial(self._enter_block, number), with_kwargs=True)
            block.register_forward_hook(partial(self._leave_block, number))

    def run(
        self, step: int, batches: Sequence[Batch], accept: Callable[[ModelOutput], bool]
    ) -> list[ModelOutput]:
        """Forward and backward passes of ``batches``, the micro-batches of step ``step``.

        ``accept`` receives each output, in order; if it returns False, the step ends with the earlier outputs, and
        without gradients of blocks or experts. The returned outputs have no graphs.
        """
        own = self._model.suspend()
        lanes = [self._lane_of(step, micro, batch) for micro, batch in enumerate(batches)]
        self._slot.barrier = self
        try:
            with self._groups.driven():
                self._forward(lanes)
                outputs = self._head(lanes, accept)
                if len(outputs) == len(lanes):
                    self._backward(lanes)
        finally:
            self._slot.barrier = None
            self._pending.clear()
            self.boundaries.clear()
            for lane in lanes:
                if not lane.run.dead:
                    lane.run.throw()  # ends the greenlet, which closes what it has open
            self._model.resume(own)
        return outputs

    # Forward ------------------------------------------------------------------------------------------------

    def _lane_of(self, step: int, micro: int, batch: Batch) -> _Lane:
        self._model.set_step(step, micro)
        return _Lane(micro, greenlet(partial(self._model.run, batch)), self._model.suspend())

    def _forward(self, lanes: Sequence[_Lane]) -> None:
        with self._groups.during(0, Phase.FORWARD):
            for lane in lanes:
                self._go_on(lane)
        for block in range(len(self._blocks)):
            for lane in lanes:
                if not (isinstance(lane.stop, _Entering) and lane.stop.block == block):
                    raise RuntimeError(
                        f"micro-batch {lane.micro} does not enter block {block}, which all others enter"
                    )
                self.boundaries.keep(block, lane.micro, lane.stop.x)
            with self._groups.during(block + 1, Phase.FORWARD):
                for lane in lanes:
                    self._go_on(lane)
                while calls := [lane.stop for lane in lanes if isinstance(lane.stop, tuple)]:
                    if len(calls) < len(lanes):
                        raise RuntimeError(f"some micro-batches request no experts in block {block}")
                    with torch.no_grad():
                        results = forward_together(self._slot, calls)
                    del calls
                    for lane in lanes:
                        self._go_on(lane, results.pop(0))

    def _go_on(self, lane: _Lane, value: Tensor | None = None) -> None:
        """Resumes the forward pass of ``lane`` until it stops again."""
        own = self._model.suspend()
        self._model.resume(lane.state)
        self._lane, lane.stop = lane, None
        try:
            with torch.enable_grad():  # restores the mode that the pass leaves when it stops
                lane.stop = lane.run.switch(*([] if value is None else [value]))
        finally:
            self._lane = None
        lane.state = self._model.suspend()
        self._model.resume(own)

    def _stop(self, stop: _Stop) -> Any:
        """Stops the calling forward pass until it is resumed."""
        assert self._lane is not None
        parent = self._lane.run.parent
        assert parent is not None
        return parent.switch(stop)

    def _enter_block(
        self, number: int, block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        lane = self._lane
        if lane is None:
            return None
        x, *others = arguments
        if number == 0:
            lane.entry = get_gradient_edge(x) if x.requires_grad else None
        elif x is not lane.stream:
            raise RuntimeError(f"block {number} does not start from the output of the previous block")
        if any(isinstance(each, Tensor) and each.requires_grad for each in (*others, *options.values())):
            raise RuntimeError(
                f"block {number} is called with a tensor beside its stream that requires a gradient"
            )
        lane.stream = None
        state = self._model.suspend()
        lane.arguments.append((tuple(others), options, state))
        x = x.detach()
        self._stop(_Entering(number, x))
        torch.set_grad_enabled(False)
        return (x, *others), options

    def _leave_block(self, number: int, block: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        lane = self._lane
        if lane is None:
            return output
        torch.set_grad_enabled(True)
        leaves = [each.detach().requires_grad_() for each in self._model.leaving(number, output)]
        lane.stream, *sides = leaves
        lane.sides.append(sides)
        if number == len(self._blocks) - 1:
            self._stop(_Entering(number + 1, lane.stream))
            torch.set_grad_enabled(True)
        return self._model.replaced(number, output, leaves)

    def compute(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
        """The experts' results for the micro-batch in progress, or for the block that is recomputed (``ExpertBarrier``)."""
        if self._lane is not None:
            result: Tensor = self._stop(
                (x_TD, weight_TK, call)
            )  # resumed once those of all micro-batches are there
            torch.set_grad_enabled(False)
            return result
        self._pending.append(PendingExperts(x_TD, weight_TK, call))
        return self._pending[-1].output()

    # Head ---------------------------------------------------------------------------------------------------

    def _head(self, lanes: Sequence[_Lane], accept: Callable[[ModelOutput], bool]) -> list[ModelOutput]:
        outputs: list[ModelOutput] = []
        last = len(self._blocks) + 1
        with self._groups.during(last, Phase.FORWARD):
            pass  # each micro-batch's backward pass follows its forward pass, so that only one graph is in memory
        with self._groups.during(last, Phase.BACKWARD):
            for lane in lanes:
                stop = lane.stop
                if not (isinstance(stop, _Entering) and stop.block == len(self._blocks)):
                    raise RuntimeError(
                        f"micro-batch {lane.micro} does not leave the last block, which all others leave"
                    )
                self._go_on(lane)
                output = lane.stop
                assert isinstance(output, ModelOutput)
                assert output.objective is not None
                lane.stop = None
                if not accept(output):
                    break
                with self._groups.micro_batch(last, lane.micro):
                    torch.autograd.backward(output.objective / len(lanes))
                assert lane.stream is not None
                lane.gradient, lane.stream = lane.stream.grad, None
                outputs.append(_without_graph(output))
        return outputs

    # Backward -----------------------------------------------------------------------------------------------

    def _backward(self, lanes: Sequence[_Lane]) -> None:
        for number in reversed(range(len(self._blocks))):
            with self._groups.during(number + 1, Phase.BACKWARD):
                self._backward_block(number, lanes)
        with self._groups.during(0, Phase.BACKWARD):
            for lane in lanes:
                with self._groups.micro_batch(0, lane.micro):
                    if lane.entry is not None:
                        torch.autograd.backward([lane.entry], [lane.gradient])

    def _backward_block(self, number: int, lanes: Sequence[_Lane]) -> None:
        again = [self._compute_again(number, lane) for lane in lanes]
        # By micro-batch: its block's request for experts, and the gradient of their results.
        requested = [
            (pending, pending.output_gradient(made[0], lane.gradient))
            for (_, made, pending), lane in zip(again, lanes, strict=True)
            if pending is not None
        ]
        if requested:
            assert len(requested) == len(lanes)
            backward_together(self._slot, requested)
        del requested
        for lane in lanes:
            boundary, made, _ = again.pop(0)
            sides = [leaf.grad for leaf in lane.sides.pop()]
            passed = [
                (tensor, gradient)
                for tensor, gradient in zip(made, (lane.gradient, *sides), strict=True)
                if tensor.requires_grad and gradient is not None
            ]
            with self._groups.micro_batch(number + 1, lane.micro):
                if passed:
                    torch.autograd.backward(
                        [tensor for tensor, _ in passed], [gradient for _, gradient in passed]
                    )
            lane.gradient = boundary.grad

    def _compute_again(self, number: int, lane: _Lane) -> tuple[Tensor, list[Tensor], PendingExperts | None]:
        """Recomputes block ``number``; returns its boundary, its output, and its request for experts."""
        others, options, state = lane.arguments.pop()
        boundary = self.boundaries.take(number, lane.micro)
        boundary.requires_grad_(number > 0 or lane.entry is not None)
        own = self._model.suspend()
        self._model.resume(state)
        with torch.enable_grad():
            made = self._model.leaving(number, self._blocks[number](boundary, *others, **options))
        self._model.resume(own)
        pending, self._pending = self._pending, []
        if len(pending) > 1:
            raise RuntimeError(f"block {number} requests experts {len(pending)} times")
        return boundary, made, pending[0] if pending else None


class _GroupPasses:
    """The passes over dense parameter groups, each of which takes all micro-batches.

    A parameter that two groups use (a tied embedding) has gradients from both: gradients from the other group's pass are
    held back until those of its own group, and then added to them, micro-batch by micro-batch.
    """

    def __init__(self, dense: DenseSlices, gates: Gates, listener: PassListener) -> None:
        self._dense = dense
        self._gates = gates
        self._listener = listener
        self._present: tuple[int, int] | None = None
        self._give: Callable[[int, Tensor], None] | None = None
        #: By parameter group and micro-batch, then by index.
        self._waiting: dict[tuple[int, int], dict[int, Tensor]] = {}

    def driven(self) -> AbstractContextManager[None]:
        """Within this context, this class decides where passes begin and end."""
        self._waiting.clear()
        return self._gates.driven(self._take)

    @contextmanager
    def during(self, group: int, phase: Phase) -> Iterator[None]:
        """A pass over ``group``. A pass that raises does not end."""
        self._listener.enter(group, phase)
        yield
        self._listener.leave(group, phase)

    @contextmanager
    def micro_batch(self, group: int, micro: int) -> Iterator[None]:
        """Micro-batch ``micro``'s part of a backward pass over ``group``."""
        self._present = group, micro
        with self._dense.micro_batch(group) as self._give:
            yield
            for index, gradient in self._waiting.pop((group, micro), {}).items():
                self._give(index, gradient)  # its own group did not use it
        self._present = self._give = None

    def _take(self, group: int, index: int, gradient: Tensor) -> None:
        assert self._present is not None
        assert self._give is not None
        present, micro = self._present
        if group != present:
            self._waiting.setdefault((group, micro), {})[index] = gradient
            return
        earlier = self._waiting.get((group, micro), {}).pop(index, None)
        self._give(index, gradient if earlier is None else earlier.add_(gradient))


def _without_graph(output: ModelOutput) -> ModelOutput:
    """``output`` detached, for the step's report."""
    loss = None if output.loss is None else output.loss.detach()
    return ModelOutput(loss, output.aux_loss.detach(), output.z_loss.detach(), None, output.loads, None)
